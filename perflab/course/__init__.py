"""The course as files: run its notebooks, keep them in one form, check them, show them.

No chapter may import this package; it stands above them all. A notebook does not use it.
"""

from .form import normalise, notebook_files
from .kernel import execute
from .lint import check
from .replay import record, run_notebooks
from .report import course

__all__ = [
    "check",
    "course",
    "execute",
    "normalise",
    "notebook_files",
    "record",
    "run_notebooks",
]
