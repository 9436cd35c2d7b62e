"""The exercises of the course: what is asked, how an answer is judged, hints, one solution."""

from . import knobs, stages, start, transfer

PROBLEMS = start.PROBLEMS | knobs.PROBLEMS | stages.PROBLEMS | transfer.PROBLEMS
