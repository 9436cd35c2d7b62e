"""The time split of a training loop: waiting for data, copying, the host, the device.

By interventions, not by stopwatches inside the loop: the device works asynchronously, so that a clock
around `next()` also counts time in which the device was busy with earlier steps. Instead the loop runs
as it is, with one batch again and again, and with that batch already on the device; what each change
saves was the exposed cost of what it took away.
"""

import contextlib
import html
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from perflab.bench import cleanup, machine, record, timing
from perflab.bench.estimate import CANNOT, HOLDS, Estimate, Finding
from perflab.bench.result import Result
from perflab.bench.settings import budget
from perflab.bench.study import vary
from perflab.errors import PerflabError

PARTS = ("wait", "copy", "host", "device")
AS_IS, CACHED, ON_DEVICE, PROFILED = "as it is", "one batch again", "batch on the device", "profiled"
# What an intervention changes besides what it takes away: a share of a step, and the seconds that waking up
# after a pause costs; together at most a twentieth of a step.
CHANGE, WAKE_S, MOST = 0.01, 0.0005, 0.05
VISITS = 40  # the timed steps of one visit take about this fraction of the whole


@dataclass(frozen=True)
class Split:
    """Shares of one step's time; `result` holds the rounds they come from.

    wait: what a free loader would save. copy: what batches already on the device would save. device: the
    device at work during the rest. host: the rest of the rest, the device idle while Python and the
    launches go on. Without a GPU the host does the arithmetic, and copy and device are not there.
    """

    result: Result

    def share(self, part: str) -> Estimate:
        """The share of `part` in a step, 0 to 1, with a 95 % interval. It is widened by 1 point and 0.5 ms, at
        most 5 points, for what the interventions themselves change."""
        if part not in PARTS:
            raise PerflabError(f"A step is split into {', '.join(PARTS)}, not {part!r}.")
        what, result = f"share of {part}", self.result
        on_gpu = ON_DEVICE in result.measured
        profiled = on_gpu and PROFILED in result.measured and math.isfinite(result["busy_s"].of(PROFILED).mid)
        if part in ("copy", "device") and not on_gpu:
            return Estimate.missing(what, result.reasons.get(ON_DEVICE, "no CUDA device here"), result.source)
        if part == "device" and not profiled:
            return Estimate.missing(what, "the profiler saw no work of the device", result.source)

        def share_of_a_round(as_is: float, cached: float, on_device: float = math.nan, busy_s: float = 0.0) -> float:
            steps = on_device if on_gpu else cached
            busy_s = min(busy_s, steps)
            seconds = {"wait": as_is - cached, "copy": cached - steps, "host": steps - busy_s, "device": busy_s}
            return seconds[part] / as_is

        kinds = [AS_IS, CACHED, ON_DEVICE] if on_gpu else [AS_IS, CACHED]
        terms = [*(("step_s", kind) for kind in kinds), *([("busy_s", PROFILED)] if profiled else [])]
        share = result.combine(share_of_a_round, *terms, what=what)
        if share.why:
            return share
        slack = min(MOST, CHANGE + WAKE_S / self.step.mid)
        lo, mid, hi = (min(1.0, max(0.0, x)) for x in (share.lo - slack, share.mid, share.hi + slack))
        return replace(share, lo=lo, mid=mid, hi=hi)

    @property
    def step(self) -> Estimate:
        """Seconds of one step of the loop as it is."""
        return replace(self.result["step_s"].of(AS_IS), what="one step")

    def bound(self, part: str) -> Estimate:
        """How many times faster the loop can become at most when `part` costs nothing: 1 / (1 - share).

        Source: Amdahl 1967, DOI 10.1145/1465482.1465560.
        """
        f = self.share(part)
        if f.why:
            return replace(f, what=f"bound of {part}")
        mid, lo, hi = (1 / (1 - x) if x < 1 else math.inf for x in (f.mid, f.lo, f.hi))
        return replace(f, mid=mid, lo=lo, hi=hi, what=f"bound of {part}")

    @property
    def largest(self) -> Finding:
        """Is the largest part clearly the largest, 1.5 times the next one or more?"""
        shares, source = self.known(), self.result.source
        if len(shares) < 2:
            return Finding(CANNOT, "one part is the largest", "fewer than two parts are known", source=source)
        first, second = sorted(shares, key=lambda part: -shares[part].mid)[:2]
        seen = f"{first} {shares[first].mid:.0%}, {second} {shares[second].mid:.0%}"
        clear = shares[first].lo >= 1.5 * shares[second].hi and not self.result.crowded
        return Finding(HOLDS if clear else CANNOT, f"{first} is the largest part", seen, source=source)

    def __repr__(self):
        return f"Split {self.result.study}: shares of {', '.join(PARTS)} in one step (timed)"

    def __str__(self):
        lines = [f"one step: {self.step}"]
        for part in PARTS:
            e = self.share(part)
            text = e.why or f"{e.mid:6.1%}  ({e.lo:.1%} to {e.hi:.1%})"
            more = "" if e.why or part == "host" else f"  at most x{self.bound(part).mid:.2f} without it"
            lines.append(f"{part:7} {text}{more}")
        largest = self.largest
        clear = "" if largest.state == HOLDS else "CANNOT TELL whether "
        return "\n".join([*lines, f"{clear}{largest.rule} ({largest.seen}).", self.result.provenance])

    def _ipython_display_(self):
        from IPython.display import display

        from perflab.show import shares

        shown = f'<pre style="font-family:monospace;white-space:pre-wrap">{html.escape(str(self))}</pre>'
        display({"text/plain": repr(self), "text/html": shown}, raw=True)
        rows = {"this machine" if s.result.source == "here" else s.result.source: s.known() for s in self.beside()}
        if any(rows.values()):
            display(shares.bar(rows, PARTS))

    def beside(self) -> list["Split"]:
        """This split, and those of recorded machines of the same study."""
        return [self, *(Split(r) for r in record.beside(self.result))]

    def known(self) -> dict[str, Estimate]:
        """The shares that are known, by part."""
        return {p: self.share(p) for p in PARTS if not self.share(p).why}


def split(
    step: Callable[[object], object],
    loader: Iterable,
    *,
    study: str = "split",
    steps: int | None = None,
    budget_s: float | None = None,
    fixed: dict | None = None,
) -> Split:
    """Split the time of `for batch in loader: step(batch)` into wait, copy, host and device.

    step(batch): one training step on a batch as the loader gives it, copying it to the device if need be.
    The model is trained on meanwhile: for some dozens of steps, most of them on one batch.
    loader: a DataLoader or any iterable of batches. steps: timed steps a visit (default: as many as fit).
    budget_s: seconds for the whole (default 3, or 30 at full budget), more where batches are slow. Raises
    PerflabError for what is no loader; a step or a loader that fails is a row of the result with its reason.

    >>> split(step, loader)  # doctest: +SKIP
    Split split: shares of wait, copy, host, device in one step (timed)
    """
    if not callable(step) or not hasattr(loader, "__iter__"):
        raise PerflabError("split(step, loader) takes a function of one batch and an iterable of batches.")
    if hasattr(loader, "__next__"):
        raise PerflabError("This loader can be gone through only once: give the DataLoader or a list, not an iterator.")
    if steps is not None and steps < 1:
        raise PerflabError(f"steps={steps} times nothing: give 1 or more, or leave it out.")
    seconds = budget_s or (30.0 if budget() == "full" else 3.0)
    loop = _Loop(step, loader, steps, seconds / VISITS)
    kinds = [AS_IS, CACHED] + [ON_DEVICE, PROFILED] * (machine.device() == "cuda")
    result = vary("fed", kinds, loop.run, prepare=loop.feed, study=study, keep=False, budget_s=seconds, fixed=fixed)
    return Split(result)


class _Loop:
    """The learner's loop and the ways to feed it. One batch is kept for the ways that do not load."""

    def __init__(self, step, loader, steps: int | None, visit_s: float):
        self.step, self.loader, self.visit_s = step, loader, visit_s
        self.steps = dict.fromkeys((AS_IS, CACHED, ON_DEVICE, PROFILED), steps)
        self.batch = None
        self.workers = getattr(loader, "num_workers", 0)
        self.ahead = self.workers * (getattr(loader, "prefetch_factor", None) or 0)

    @contextlib.contextmanager
    def feed(self, kind: str):
        """Batches without end, of one kind. As it is: past those that workers loaded ahead of time."""
        if self.batch is None:
            with contextlib.closing(_endless(self.loader)) as batches:
                self.batch = next(batches)
            cleanup.end_loader_workers(self.loader)
        if kind == AS_IS:
            batches, ahead = _endless(self.loader), self.ahead
        else:
            batches, ahead = _repeat(self.batch if kind == CACHED else to_device(self.batch)), 0
        try:
            self._go(batches, ahead + 1)
            if self.steps[kind] is None:
                once = min(self._go(batches, 1) for _ in range(3))
                wanted = max(3, min(50, round(self.visit_s / once)))
                self.steps[kind] = wanted + -wanted % max(1, self.workers)  # workers deliver in turns
            yield kind, batches
        finally:
            batches.close()
            if kind == AS_IS:
                cleanup.end_loader_workers(self.loader)

    def run(self, fed):
        """The timed steps of one visit; the mean of one goes into the result."""
        kind, batches = fed
        if kind == PROFILED:
            few = min(self.steps[kind], 5)
            return timing.samples(busy_s=timing.busy(lambda: self._go(batches, few)) / few)
        return timing.samples(step_s=self._go(batches, self.steps[kind]))

    def _go(self, batches: Iterator, steps: int) -> float:
        """Seconds of one step, the mean of `steps`."""
        timing.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(next(batches))
        timing.synchronize()
        return (time.perf_counter() - began) / steps


def _endless(loader: Iterable):
    """The loader's batches, epoch after epoch; closing the generator ends the workers."""
    while True:
        batches = iter(loader)
        empty = True
        try:
            for batch in batches:
                empty = False
                yield batch
        finally:
            if batches is not getattr(loader, "_iterator", None):  # persistent workers go on to the next epoch
                cleanup.end_loader_workers(batches)
        if empty:
            raise PerflabError("The loader gives no batch: is its dataset empty, or drop_last on?")


def _repeat(batch):
    while True:
        yield batch


def to_device(batch):
    """The batch with its tensors on the current CUDA device; containers keep their kind."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "to"):
        return batch.to("cuda")
    if isinstance(batch, Mapping):
        return type(batch)((k, to_device(v)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_device, batch))
    return type(batch)(map(to_device, batch)) if isinstance(batch, list | tuple) else batch
