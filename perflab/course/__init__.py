"""The course as files: run its notebooks, keep them in one form, check them, show them.

No chapter may import this package; it stands above them all. A notebook does not use it.
"""

from perflab.course.form import normalise, paths
from perflab.course.guard import check
from perflab.course.kernel import execute
from perflab.course.replay import record, run_notebooks
from perflab.course.report import course

__all__ = [
    "check",
    "course",
    "execute",
    "normalise",
    "paths",
    "record",
    "run_notebooks",
]
