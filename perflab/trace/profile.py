"""A few steps under torch.profiler, with the price of profiling itself measured beside them.

What is timed is timed without the profiler; what the profiler says of gaps is refused where it made them.
"""

import contextlib
import gzip
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from perflab.bench import files, progress, timing
from perflab.bench.profiler import exported, profiler
from perflab.errors import PerflabError
from perflab.launch.dispatch import check_callable

LIMIT = 1.15  # beyond it, gaps in a trace are partly the profiler's own (a tiny operator takes up to twice as long)
MOST = 1000  # steps: all their events are held in memory
STEP = "ProfilerStep#"
FRAME = re.compile(r"\(\d+\): ")  # "train.py(27): step"
OPEN = "open https://ui.perfetto.dev in a browser and drop the file there: the page reads it here and sends nothing"


@dataclass(frozen=True)
class Profiled:
    """What one profile of `steps` steps holds. `plain_s` and `profiled_s` are seconds of one step."""

    steps: int
    recorded: int
    plain_s: tuple[float, float]  # before and after the profiled steps
    profiled_s: float
    operators: tuple[dict, ...] = field(repr=False)
    packed: bytes = field(repr=False)  # torch's own JSON, gzipped

    @cached_property
    def trace(self):
        """The recorded events, read (a `trace.Trace`): busy share, gaps with their cause, kernels, findings."""
        from .trace import read_trace

        return read_trace(json.loads(gzip.decompress(self.packed)))

    @property
    def distortion(self) -> float:
        """A step under the profiler over one without it: the mean of the steps before and after."""
        return self.profiled_s / (sum(self.plain_s) / 2)

    @property
    def distrust(self) -> str:
        """Why gaps in this trace are not to be believed, or "" where they are."""
        low, high = sorted(self.plain_s)
        if self.distortion > LIMIT:
            return (
                f"the profiler slows this loop {_times(self.distortion)}: gaps in this trace are partly its own; "
                "trust kernel times and counts, not gaps."
            )
        if high > LIMIT * low:
            return (
                f"the steps without the profiler differ by {_times(high / low)} before and after it: whether the "
                "profiler slows this loop cannot be told; measure again on a quieter machine."
            )
        return ""

    def table(self, n: int = 10):
        """The `n` operators with the most self time, as a pandas DataFrame, in seconds over all steps.

        Self time leaves out what an operator called; the totals of parents and children hold the same time
        twice. Sorted by time on the device where there is one, else on the host.
        """
        import pandas as pd

        key = "self_device_s" if any(row["self_device_s"] for row in self.operators) else "self_host_s"
        rows = sorted(self.operators, key=lambda row: -row[key])
        whole = sum(row[key] for row in rows) or 1.0
        shown = [row | {"share": row[key] / whole} for row in rows[:n]]
        columns = ["operator", "calls", "self_host_s", "total_host_s", "self_device_s", "share"]
        if key == "self_host_s":
            columns.remove("self_device_s")
        return pd.DataFrame(shown, columns=columns)

    def export(self, path: str | Path) -> str:
        """Write the trace where you say, for Perfetto; returns how to open it. Overwrites nothing.

        The name of the computer and the place of the file are left out of it. Raises PerflabError for a
        place that cannot be written to, and for a name that Perfetto would not know.
        """
        try:
            path = Path(path).expanduser()
        except (TypeError, RuntimeError) as e:
            raise PerflabError(f"{path!r} is no path ({e}): take one such as run.json.gz.") from None
        if not path.name.endswith((".json", ".json.gz")):
            raise PerflabError(f"{path.name}: a trace is called something.json or something.json.gz.")
        if os.path.lexists(path):
            raise PerflabError(f"{path} exists and is not overwritten: take another name or remove it first.")
        if not os.path.isdir(path.parent):
            raise PerflabError(f"The folder {path.parent} does not exist: make it first, or take another.")
        whole = json.loads(gzip.decompress(self.packed))
        whole.pop("host_name", None)
        text = json.dumps(whole | {"traceName": path.name}).encode()
        try:
            files.put(path, gzip.compress(text) if path.suffix == ".gz" else text)
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise PerflabError(f"{path} cannot be written ({why}): take another place.") from None
        return f"{path.name} is written: {OPEN}."

    def __repr__(self):
        """Stable text: no timed figure."""
        return f"Profiled({self.recorded} steps, {len(self.operators)} operators; distortion timed)"

    def __str__(self):
        said = self.distrust or "the profiler hardly slows this loop, so that gaps in this trace are its own."
        return f"{self.recorded} steps, profiled over plain {_times(self.distortion)}: {said}"

    def _repr_html_(self):
        return f"<p>{self}</p>"


def _times(factor: float) -> str:
    return f"x{factor:.2f}" if factor < 10 else f"x{factor:,.0f}"


def profiled(step: Callable[[], object], steps: int = 5, warmup: int = 3, memory: bool = False) -> Profiled:
    """`steps` steps of a loop under torch.profiler, and as many without it before and after.

    `step()` runs 2 x warmup + 3 x steps times: first `warmup` times unobserved, then plain, then under the
    profiler (whose own first `warmup` steps are dropped), then plain again. Host and device are recorded
    where each is supported; `memory` also records each allocation. Times of steps are in seconds, the device
    synchronised at both ends of the `steps` steps, not in between.
    Raises PerflabError for bad arguments, for a profiler that is already running, and where nothing was recorded.

    >>> print(profiled(step, steps=5))  # doctest: +SKIP
    """
    _checked(step, steps, warmup)
    with progress.bar("profiling", "steps", 2 * warmup + 3 * steps) as told:  # told of nothing within what is timed
        with _alone():
            for _ in range(warmup):
                step()
                told.update()
            before = _plain(step, steps)
        told.update(steps)
        seen, profiled_s = _under_profiler(step, steps, warmup, memory)
        told.update(warmup + steps)
        after = _plain(step, steps)
    text = exported(seen)
    names = {e.get("name", "") for e in json.loads(text)["traceEvents"] if e.get("cat") == "user_annotation"}
    recorded, packed = sum(name.startswith(STEP) for name in names), gzip.compress(text.encode(), compresslevel=1)
    if recorded == 0:
        raise PerflabError(
            "0 steps were recorded: the schedule never became active; does step start or stop a profiler of its own?"
        )
    return Profiled(steps, recorded, (before, after), profiled_s, tuple(_operators(seen)), packed)


def _checked(step, steps, warmup):
    check_callable(step)
    for name, x in (("steps", steps), ("warmup", warmup)):
        if isinstance(x, bool) or not isinstance(x, int) or not 1 <= x <= MOST:
            raise PerflabError(f"{name}={x!r} must be a whole number from 1 to {MOST:,}: a few steps say it all.")
    if torch._C._autograd._profiler_enabled():
        raise PerflabError("A profiler is already running, and there is one for a process: stop it first.")


class _Pace:
    """Seconds of one step of a few: the median where each step ends when it returns, else their mean."""

    def __init__(self):
        timing.synchronize()
        self.marks = [time.perf_counter()]

    def step(self):
        self.marks.append(time.perf_counter())

    def end(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels that still run belong to these steps
            return (time.perf_counter() - self.marks[0]) / (len(self.marks) - 1)
        return statistics.median(b - a for a, b in itertools.pairwise(self.marks))


def _plain(step, steps: int) -> float:
    pace = _Pace()
    for _ in range(steps):
        step()
        pace.step()
    return pace.end()


def _under_profiler(step, steps: int, warmup: int, memory: bool):
    """The profiler after its schedule has run, and the seconds of one recorded step."""
    plan = torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    with profiler(schedule=plan, profile_memory=memory) as seen, _alone():
        for _ in range(warmup):
            step()
            timing.synchronize()  # or kernels that still run would be taken for those of the recorded steps
            seen.step()
        pace = _Pace()
        for _ in range(steps - 1):
            step()
            seen.step()
            pace.step()
        step()
        pace.step()
        seconds = pace.end()
        seen.step()  # takes the events in, which is no part of a step
    return seen, seconds


@contextlib.contextmanager
def _alone():
    """A profiler within a profiler crashes torch, so that one that `step` starts is a sentence instead."""
    from torch.autograd.profiler import profile

    plain = profile.__init__

    def refuse(*_, **__):
        raise PerflabError("step starts a profiler of its own, and there is one for a process: take it out of step.")

    profile.__init__ = refuse
    try:
        yield
    finally:
        profile.__init__ = plain


def _operators(seen):
    """A row per operator, from torch's averages; Python frames and annotations are no operators."""
    from torch.autograd import DeviceType

    for e in seen.key_averages():
        annotation = getattr(e, "is_user_annotation", False) or e.key.startswith("ProfilerStep")
        python = FRAME.search(e.key) or e.key.startswith(("<", "nn.Module:"))
        if e.device_type != DeviceType.CPU or annotation or python or e.key.startswith("["):
            continue
        yield {
            "operator": e.key,
            "calls": e.count,
            "self_host_s": e.self_cpu_time_total / 1e6,
            "total_host_s": e.cpu_time_total / 1e6,
            "self_device_s": getattr(e, "self_device_time_total", 0.0) / 1e6,
        }
