"""The exercises of the course: what is asked, how an answer is judged, hints, one solution."""

from . import start

PROBLEMS = start.PROBLEMS
