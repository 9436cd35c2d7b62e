"""The exercises of notebook 06_profiler."""

PROBLEMS: dict = {}
