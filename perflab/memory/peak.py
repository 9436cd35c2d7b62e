"""The step and the phase in which memory peaks, and what is alive at that moment, with file and line.

On a CUDA device the caching allocator is asked, and its history of allocations. Elsewhere every tensor's
storage is counted by a dispatch mode as it comes and goes: exact bytes, the same on every machine.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench import machine
from perflab.bench.code import Place, caller, is_own, place
from perflab.bench.units import quantity
from perflab.errors import PerflabError
from perflab.launch.dispatch import check_callable

from .phases import FORWARD, PHASES, Phases

BEFORE = "before the first step"
ENTRIES = 100_000  # of the allocator's history: unlimited is its own default, and takes minutes to read


@dataclass(frozen=True)
class Alive:
    """Memory that is alive at the peak: bytes of all allocations of one line, in one phase."""

    bytes: int
    file: str
    line: int
    code: str
    phase: str
    count: int = 1

    @property
    def place(self) -> str:
        return str(Place(self.file, self.line)) if self.line else self.file or self.phase

    def __str__(self):
        return f"{quantity(self.bytes, 'bytes')}, {self.phase}, {self.place}: {self.code}".rstrip(": ")

    __repr__ = __str__


@dataclass(frozen=True)
class Peak:
    """Where memory peaks: the step, counted from 1, its phase, and the bytes alive at once.

    `phases` maps (step, phase) to its own peak in bytes; `alive` is what is alive at the peak, largest first.
    `counted` says by what: "allocator" (a CUDA device's) or "tensors".
    """

    step: int
    phase: str
    bytes: int
    phases: dict[tuple[int, str], int]
    alive: tuple[Alive, ...]
    counted: str

    def table(self):
        """Peak bytes by step and phase, as a pandas DataFrame: a row a step, a column a phase."""
        import pandas as pd

        steps = sorted({step for step, _ in self.phases})
        known = [p for p in PHASES if any(p == phase for _, phase in self.phases)]
        rows = [[self.phases.get((step, p), 0) for p in known] for step in steps]
        return pd.DataFrame(rows, pd.Index(steps, name="step"), known)

    def __repr__(self):
        """Stable where tensors were counted; an allocator's bytes are its own machine's."""
        size = f", {self.bytes:,} bytes" if self.counted == "tensors" else ""
        return f"Peak in step {self.step}, {self.phase}{size}, counted by {self.counted}"

    def __str__(self):
        lines = [f"Memory peaks in step {self.step}, {self.phase}: {quantity(self.bytes, 'bytes')} ({self.counted})."]
        return "\n".join([*lines, *(f"  {a}" for a in self.alive[:5])])

    def _repr_html_(self):
        rows = "".join(
            f"<tr><td>{quantity(a.bytes, 'bytes')}</td><td>{a.count}</td><td>{a.phase}</td><td>{a.place}</td>"
            f"<td><code>{a.code}</code></td></tr>"
            for a in self.alive[:6]
        )
        head = "<tr><th>alive</th><th>blocks</th><th>made in</th><th>where</th><th>line</th></tr>"
        return f"<p>{str(self).splitlines()[0]}</p><table>{head}{rows}</table>"


def peak_step(step: Callable[[], object], steps: int = 3, device: str | None = None) -> Peak:
    """Run `step()` `steps` times and say in which of them, and in which phase, memory peaks.

    Phases are told by torch's own doors: backward is inside of Tensor.backward or autograd.grad, optimizer
    inside of an Optimizer's step; forward is what comes before, and again from a module's next call; what is
    left is the rest, such as clipping. No warm-up: an optimizer's state, which comes with its first step,
    belongs to the answer. `device` is "cuda" or "cpu" (default: cuda where there is one). On
    CUDA the peak statistics of torch are reset. Not seen: what an operator takes and gives back inside, on
    the CPU; what libraries take beside torch, on either.
    Raises PerflabError for bad arguments and where the steps allocate nothing.

    >>> peak_step(lambda: torch.ones(1000, 1000).sum(), device="cpu")
    Peak in step 1, forward, 4,000,004 bytes, counted by tensors
    """
    check_callable(step)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PerflabError(f"steps={steps!r} must be a whole number of at least 1.")
    device = device or machine.device()
    if device not in ("cuda", "cpu"):
        raise PerflabError(f'device={device!r} must be "cuda" (the current device) or "cpu".')
    if device == "cpu":
        return _by_tensors(step, steps)
    if why := machine.missing("cuda"):
        raise PerflabError(f'peak_step asks the allocator of a CUDA device: {why}; device="cpu" counts tensors.')
    return _by_allocator(step, steps)


# -- tensors counted


class _Storages(TorchDispatchMode):
    """Each storage that an operator returns, from then until it is freed; those it reads, from their first use."""

    def __init__(self, phases: Phases):
        super().__init__()
        self.phases = phases
        self.owner = threading.get_ident()
        self.changes: list[tuple[int, int, tuple[int, str]]] = []  # (storage's number, +-bytes, where the loop is)
        self.made: dict[int, Alive] = {}
        self.open: dict[int, tuple[int, weakref.ref]] = {}
        self.inputs: set[int] = set()  # those that no operator of these steps made, met in the first step
        self.number = itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for t in tree_leaves((args, kwargs)):
            self._meet(t, made=False)
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            self._meet(t, made=True)
        return out

    def _meet(self, t, made: bool):
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.device.type == "meta":
            return
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes == 0 or (key in self.open and self.open[key][1]() is not None):
            return
        number = next(self.number)
        self.open[key] = number, weakref.ref(storage, lambda _: self._gone(number, nbytes))
        self.changes.append((number, nbytes, self.phases.at))
        if made:
            here = caller(self.owner)
            self.made[number] = Alive(nbytes, here.file, here.line, here.code, self.phases.at[1])
        else:
            self.made[number] = Alive(nbytes, BEFORE, 0, "", "parameters and inputs")
            if self.phases.step == 1:
                self.inputs.add(number)

    def _gone(self, number: int, nbytes: int):
        self.changes.append((number, -nbytes, self.phases.at))


def _by_tensors(step, steps: int) -> Peak:
    phases = Phases()
    seen = _Storages(phases)
    with phases.watched(), seen:
        phases.run(step, steps)
    changes = seen.changes.copy()
    left = {number for number, _, _ in changes}
    left -= {number for number, nbytes, _ in changes if nbytes < 0}
    always = seen.inputs & left  # parameters: met at their first use, there from the start
    base = sum(seen.made[n].bytes for n in always)
    return _peak([c for c in changes if c[0] not in always], base, always, seen.made, "tensors")


def _peak(changes, base: int, always: set[int], made: dict[int, Alive], counted: str) -> Peak:
    """The highest point of a history of allocations, on top of `base` bytes that are always there."""
    total, best, at, alive, live = base, -1, (1, FORWARD), set(), set()
    phases: dict[tuple[int, str], int] = {}
    for number, nbytes, where in changes:
        total += nbytes
        (live.add if nbytes > 0 else live.discard)(number)
        if nbytes > 0:  # a phase that only frees has no peak of its own
            phases[where] = max(phases.get(where, 0), total)
        if total > best:
            best, at, alive = total, where, live.copy()
    if not made:
        raise PerflabError("These steps allocated no tensor, so that there is no peak: does step run the model?")
    return Peak(*at, max(best, base), phases, _gathered(made[n] for n in alive | always), counted)


def _gathered(alive) -> tuple[Alive, ...]:
    """Allocations of one line and phase as one, the largest first."""
    groups: dict[tuple, list[Alive]] = {}
    for a in alive:
        groups.setdefault((a.file, a.line, a.phase), []).append(a)
    summed = [Alive(sum(a.bytes for a in g), *key[:2], g[0].code, key[2], len(g)) for key, g in groups.items()]
    return tuple(sorted(summed, key=lambda a: -a.bytes))


# -- an allocator asked


def _by_allocator(step, steps: int) -> Peak:
    peaks: dict[tuple[int, str], int] = {}
    marks: list[tuple[int, tuple[int, str]]] = []  # how many allocations there were when a phase ended

    def turn():
        peaks[phases.at] = max(peaks.get(phases.at, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        marks.append((_allocations(), phases.at))

    torch.cuda.init()
    base, phases = torch.cuda.memory_allocated(), Phases(turn)
    torch.cuda.reset_peak_memory_stats()
    began = _allocations()
    with phases.watched(), _history() as events:
        phases.run(step, steps)
    if not events:
        raise PerflabError("These steps allocated nothing on the device: does step run the model there?")
    at = max(peaks, key=peaks.get)
    changes, made = _read(events, [(n - began, where) for n, where in marks])
    made[-1] = Alive(base, BEFORE, 0, "", "parameters and inputs")
    alive = _peak(changes, base, {-1} if base else set(), made, "allocator").alive
    return Peak(*at, peaks[at], peaks, alive, "allocator")


def _allocations() -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


@contextlib.contextmanager
def _history():
    """The current device's allocations and frees, filled in at the end; the recording is always switched off."""
    events: list[dict] = []
    record = torch.cuda.memory._record_memory_history
    record(enabled="all", context="alloc", stacks="python", max_entries=ENTRIES)
    try:
        yield events
        traces = torch.cuda.memory._snapshot()["device_traces"]
        events.extend(traces[torch.cuda.current_device()] if traces else [])
    finally:
        record(enabled=None)


def _read(events: list[dict], marks) -> tuple[list, dict[int, Alive]]:
    """The allocator's events as changes, each with its phase: told by the number of allocations before it."""
    changes, made, open_at = [], {}, {}
    numbers, ends = itertools.count(), iter(marks)
    until, where = next(ends)
    for event in events:
        if event["action"] == "alloc":
            number = next(numbers)
            while number >= until and (following := next(ends, None)):
                until, where = following
            open_at[event["addr"]] = number
            made[number] = _made(event, where[1])
            changes.append((number, event["size"], where))
        elif event["action"] == "free_completed" and event["addr"] in open_at:
            number = open_at.pop(event["addr"])
            changes.append((number, -made[number].bytes, where))
    return changes, made


def _made(event: dict, phase: str) -> Alive:
    """An allocation with the innermost frame of the learner's own code; backward's threads have none."""
    for frame in event.get("frames", ()):
        if is_own(frame["filename"]):
            here = place(frame["filename"], frame["line"])
            return Alive(event["size"], here.file, here.line, here.code, phase)
    return Alive(event["size"], "", 0, "", phase)
