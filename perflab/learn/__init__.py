"""How the course teaches: predictions, questions, claims and their verdicts. The top floor."""
