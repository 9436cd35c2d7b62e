"""The exercises of notebook 04_kernel_launch."""

PROBLEMS: dict = {}
