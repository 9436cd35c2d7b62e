"""How the course looks: one style, figures of results, explorers. Measures nothing."""
