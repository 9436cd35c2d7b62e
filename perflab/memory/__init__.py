"""The memory of a training step: `peak` has `peak_step`, which says when it is highest, and what is alive then."""
