"""How to measure, alike for every chapter. Nothing of `show`, `learn` or a chapter may enter."""
