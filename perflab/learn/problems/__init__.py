"""The exercises of the course: what is asked, how an answer is judged, hints, one solution."""

from . import knobs, launch, profiler, roofline, stages, start, transfer

PROBLEMS = (
    start.PROBLEMS
    | knobs.PROBLEMS
    | stages.PROBLEMS
    | transfer.PROBLEMS
    | launch.PROBLEMS
    | roofline.PROBLEMS
    | profiler.PROBLEMS
)
