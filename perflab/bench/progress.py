"""A progress bar for those who watch, and the question whether anybody does."""

import os
import sys


def shell():
    """The running IPython shell, or None."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def bar(what: str, unit: str, total: int | None = None, delay_s: float = 1.0):
    """A tqdm bar that goes away at the end. None is drawn into a file, nor with $PERFLAB_PROGRESS=off."""
    from tqdm.auto import tqdm  # in a notebook this pulls in ipywidgets

    off = os.environ.get("PERFLAB_PROGRESS") == "off" or not (shell() or sys.stderr.isatty())
    return tqdm(desc=what, total=total, unit=f" {unit}", leave=False, disable=off, delay=delay_s)
