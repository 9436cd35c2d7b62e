"""A few steps under torch.profiler, with the price of profiling itself measured beside them.

What is timed is timed without the profiler; what the profiler says of gaps is refused where it made them.
"""

import gzip
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from perflab.bench import files, progress, timing
from perflab.bench.profiler import exported, profiler
from perflab.errors import PerflabError
from perflab.launch.dispatch import check_callable

from .host import STEP

LIMIT = 1.15  # beyond it, gaps in a trace are partly the profiler's own (a tiny operator takes up to twice as long)
MOST = 1000  # steps: all their events are held in memory
NO_OPERATOR = re.compile(r"^ProfilerStep|^nn\.Module:|^[<\[]|\(\d+\): ")  # the last: "train.py(27): step"
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
    def warning(self) -> str:
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

        columns = ["operator", "calls", "self_host_s", "total_host_s", "self_device_s"]
        table = pd.DataFrame(self.operators, columns=columns)
        key = "self_device_s" if table.self_device_s.any() else "self_host_s"
        table["share"] = table[key] / (table[key].sum() or 1.0)
        if key == "self_host_s":
            table = table.drop(columns="self_device_s")
        return table.sort_values(key, ascending=False, kind="stable", ignore_index=True).head(n)

    def export(self, path: str | Path) -> str:
        """Write the trace where you say, for Perfetto; returns how to open it. Overwrites nothing.

        The name of the computer and the place of the file are left out of it. Raises PerflabError for a
        place that cannot be written to, and for a name that Perfetto would not know.
        """
        path = Path(os.path.expanduser(path))
        refusals = {
            "a trace is called something.json or something.json.gz": not path.name.endswith((".json", ".json.gz")),
            "it exists and is not overwritten: take another name or remove it first": os.path.lexists(path),
            "its folder does not exist: make it first, or take another": not os.path.isdir(path.parent),
        }
        for why, holds in refusals.items():
            if holds:
                raise PerflabError(f"{path}: {why}.")
        whole = json.loads(gzip.decompress(self.packed))
        whole.pop("host_name", None)
        text = json.dumps(whole | {"traceName": path.name}).encode()
        try:
            files.put(path, gzip.compress(text) if path.suffix == ".gz" else text)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise PerflabError(f"{path} cannot be written ({why}): take another place.") from None
        return f"{path.name} is written: {OPEN}."

    def __repr__(self):
        """Stable text: no timed figure."""
        return f"Profiled({self.recorded} steps, {len(self.operators)} operators; distortion timed)"

    def __str__(self):
        said = self.warning or "the profiler hardly slows this loop, so that gaps in this trace are its own."
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
    with progress.bar("profiling", "steps", 2 * warmup + 3 * steps) as bar:  # not told within what is timed
        with _no_other_profiler():
            for _ in range(warmup):
                step()
                bar.update()
            before = _step_s(step, steps)
        bar.update(steps)
        finished, profiled_s = _under_profiler(step, steps, warmup, memory)
        bar.update(warmup + steps)
        after = _step_s(step, steps)
    text = exported(finished)
    events = json.loads(text)["traceEvents"]
    recorded = len({event["name"] for event in events if event.get("name", "").startswith(STEP)})
    if recorded == 0:
        raise PerflabError(
            "0 steps were recorded: the schedule never became active; does step start or stop a profiler of its own?"
        )
    packed = gzip.compress(text.encode(), compresslevel=1)
    return Profiled(steps, recorded, (before, after), profiled_s, tuple(_operators(finished)), packed)


def _checked(step, steps, warmup):
    check_callable(step)
    for name, x in (("steps", steps), ("warmup", warmup)):
        if isinstance(x, bool) or not isinstance(x, int) or not 1 <= x <= MOST:
            raise PerflabError(f"{name}={x!r} must be a whole number from 1 to {MOST:,}: a few steps say it all.")
    if torch._C._autograd._profiler_enabled():
        raise PerflabError("A profiler is already running, and there is one for a process: stop it first.")


def _step_s(step, steps: int, between: Callable[[], object] = lambda: None) -> float:
    """Seconds of one step of a few: the median where each step ends when it returns, else their mean."""
    timing.synchronize()
    marks = [time.perf_counter()]
    for number in range(steps):
        if number:
            between()
        step()
        marks.append(time.perf_counter())
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # kernels that still run belong to these steps
        return (time.perf_counter() - marks[0]) / steps
    return float(np.median(np.diff(marks)))


def _under_profiler(step, steps: int, warmup: int, memory: bool):
    """The profiler after its schedule has run, and the seconds of one recorded step."""
    plan = torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    with profiler(schedule=plan, profile_memory=memory) as running, _no_other_profiler():
        for _ in range(warmup):
            step()
            timing.synchronize()  # or kernels that still run would be taken for those of the recorded steps
            running.step()
        seconds = _step_s(step, steps, between=running.step)
        running.step()  # takes the events in, which is no part of a step
    return running, seconds


def _no_other_profiler():
    """A profiler within a profiler crashes torch, so that one that `step` starts is a sentence instead."""

    def refuse(*_, **__):
        raise PerflabError("step starts a profiler of its own, and there is one for a process: take it out of step.")

    return mock.patch.object(torch.autograd.profiler.profile, "__init__", refuse)


def _operators(finished):
    """A row per operator, from torch's averages; Python frames and annotations are no operators."""
    for row in finished.key_averages():
        annotation = getattr(row, "is_user_annotation", False) or NO_OPERATOR.search(row.key)
        if row.device_type == torch.autograd.DeviceType.CPU and not annotation:
            yield {
                "operator": row.key,
                "calls": row.count,
                "self_host_s": row.self_cpu_time_total / 1e6,
                "total_host_s": row.cpu_time_total / 1e6,
                "self_device_s": getattr(row, "self_device_time_total", 0.0) / 1e6,
            }
