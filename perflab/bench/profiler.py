"""torch's profiler, set up alike wherever one is started, and the file that it writes."""

import inspect
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from perflab.errors import PerflabError

from . import machine

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 and newer write a line at every start and stop


def profiler(activities: Sequence[str] = ("CPU", "CUDA"), **options) -> torch.profiler.profile:
    """A torch profiler of those of the activities that this torch and this machine have, or else of all of them.

    Options are torch's own.
    """
    from torch.profiler import ProfilerActivity, profile, supported_activities

    wanted = [getattr(ProfilerActivity, name) for name in activities if name != "CUDA" or machine.cuda_devices()]
    if "acc_events" in inspect.signature(profile.__init__).parameters:
        options["acc_events"] = True  # without it the events of a cycle are dropped, and torch warns
    return profile(activities=[a for a in wanted if a in supported_activities()] or None, **options)


def exported(finished: torch.profiler.profile) -> str:
    """The Chrome trace of a finished torch profiler, as torch writes it.

    Raises PerflabError where the profiler has none to give, and where there is no room to write it.
    """
    with tempfile.TemporaryDirectory(prefix="perflab-") as folder:
        path = Path(folder) / "trace.json"
        try:
            finished.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:
            why = str(error).partition("\n")[0] or "not finished"
            raise PerflabError(
                f"The profiler has no trace to give ({why}): read it after its `with` block, "
                "and where it was exported already, read that file."
            ) from error
        if not path.is_file():  # torch only logs that it could not write
            raise PerflabError(f"The profiler's trace could not be written to {path.parent.parent}: make room there.")
        return path.read_text("utf-8", errors="replace")
