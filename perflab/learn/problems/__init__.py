"""The exercises of the course: what is asked, how an answer is judged, hints, one solution."""

from . import stages, start, transfer

PROBLEMS = start.PROBLEMS | stages.PROBLEMS | transfer.PROBLEMS
