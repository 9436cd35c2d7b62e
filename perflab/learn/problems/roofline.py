"""The exercises of notebook 05_roofline."""

PROBLEMS: dict = {}
