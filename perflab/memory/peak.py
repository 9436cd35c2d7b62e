"""The step and the phase in which memory peaks, and what is alive at that moment, with file and line.

On a CUDA device the caching allocator is asked, and its history of allocations. Elsewhere every tensor's
storage is counted by a dispatch mode as it comes and goes: exact bytes, the same on every machine.
"""

import contextlib
import itertools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench import machine
from perflab.bench.code import Place, caller, is_own, place
from perflab.bench.units import quantity
from perflab.errors import PerflabError
from perflab.launch.dispatch import check_callable
from perflab.show.table import Answer, paragraph, table

FORWARD, BACKWARD, OPTIMIZER, REST = PHASES = "forward", "backward", "optimizer", "rest"
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
class Peak(Answer):
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

        table = pd.Series(self.phases).unstack(fill_value=0)
        return table[[phase for phase in PHASES if phase in table]].rename_axis(index="step", columns=None)

    def __repr__(self):
        """Stable where tensors were counted; an allocator's bytes are its own machine's."""
        size = f", {self.bytes:,} bytes" if self.counted == "tensors" else ""
        return f"Peak in step {self.step}, {self.phase}{size}, counted by {self.counted}"

    def __str__(self):
        lines = [f"Memory peaks in step {self.step}, {self.phase}: {quantity(self.bytes, 'bytes')} ({self.counted})."]
        return "\n".join([*lines, *(f"  {a}" for a in self.alive[:5])])

    def rows(self) -> list[dict]:
        head = ("alive", "blocks", "made in", "where", "line")
        lines = ((quantity(a.bytes, "bytes"), a.count, a.phase, a.place, a.code) for a in self.alive)
        return [dict(zip(head, line, strict=True)) for line in lines]

    def html(self) -> str:
        return paragraph(str(self).splitlines()[0]) + table(self.rows()[:6])


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


# -- the phases of a step


class Phases:
    """The phases of a training step, while a loop runs that knows nothing of it.

    `at` is where the loop is: (step, phase). `turn` is called before each change.
    """

    def __init__(self, turn: Callable[[], None] = lambda: None):
        self.step, self.inside, self.turn = 1, [FORWARD], turn

    @property
    def at(self) -> tuple[int, str]:
        return self.step, self.inside[-1]

    def between(self, name: str):
        """The phase outside of backward and optimizer."""
        if self.inside[0] != name and len(self.inside) == 1:
            self.turn()
            self.inside[0] = name

    def begin(self, name: str):
        self.turn()
        self.inside.append(name)

    def end(self):
        self.turn()
        self.inside.pop()
        self.between(REST)

    def run(self, step, steps: int):
        """The steps, with torch's doors to backward and optimizer watched, and afterwards as they were."""
        with contextlib.ExitStack() as watched:
            for name in ("backward", "grad"):
                door = self._told(getattr(torch.autograd, name))
                watched.enter_context(mock.patch.object(torch.autograd, name, door))
            for hook in (
                register_module_forward_pre_hook(lambda *_: self.between(FORWARD)),
                optimizer.register_optimizer_step_pre_hook(lambda *_: self.begin(OPTIMIZER)),
                optimizer.register_optimizer_step_post_hook(lambda *_: self.end()),
            ):
                watched.callback(hook.remove)
            for self.step in range(1, steps + 1):
                step()
                self.turn()
                self.inside = [FORWARD]

    def _told(self, backward: Callable) -> Callable:
        def told(*args, **kwargs):
            self.begin(BACKWARD)
            try:
                return backward(*args, **kwargs)
            finally:
                self.end()

        return told


# -- tensors counted


class _Storages(TorchDispatchMode):
    """Each storage that an operator returns, from then until it is freed; those it reads, from their first use."""

    def __init__(self, phases: Phases):
        super().__init__()
        self.phases = phases
        self.owner = threading.get_ident()
        self.changes: list[tuple[int, int, tuple[int, str]]] = []  # (storage's number, +-bytes, where the loop is)
        self.blocks: dict[int, Alive] = {}
        self.open: dict[int, weakref.ref] = {}  # by address
        self.inputs: set[int] = set()  # those that no operator of these steps made, met in the first step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, is_new=False)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            self._meet(tensor, is_new=True)
        return out

    def _meet(self, tensor, is_new: bool):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes == 0 or (key in self.open and self.open[key]() is not None):
            return
        number = len(self.blocks)
        self.open[key] = weakref.ref(storage, lambda _: self._gone(number, nbytes))
        self.changes.append((number, nbytes, self.phases.at))
        if is_new:
            here = caller(self.owner)
            self.blocks[number] = Alive(nbytes, here.file, here.line, here.code, self.phases.at[1])
        else:
            self.blocks[number] = Alive(nbytes, BEFORE, 0, "", "parameters and inputs")
            if self.phases.step == 1:
                self.inputs.add(number)

    def _gone(self, number: int, nbytes: int):
        self.changes.append((number, -nbytes, self.phases.at))


def _by_tensors(step, steps: int) -> Peak:
    phases = Phases()
    storages = _Storages(phases)
    with storages:
        phases.run(step, steps)
    changes = storages.changes.copy()  # what is freed from here on is no part of the steps
    freed = {number for number, nbytes, _ in changes if nbytes < 0}
    always = storages.inputs - freed  # parameters: met at their first use, there from the start
    base = sum(storages.blocks[number].bytes for number in always)
    changes = [change for change in changes if change[0] not in always]
    return _peak(changes, base, always, storages.blocks, "tensors")


def _peak(changes, base: int, always: set[int], blocks: dict[int, Alive], counted: str) -> Peak:
    """The highest point of a history of allocations, on top of `base` bytes that are always there."""
    if not blocks:
        raise PerflabError("These steps allocated no tensor, so that there is no peak: does step run the model?")
    totals = list(itertools.accumulate((nbytes for _, nbytes, _ in changes), initial=base))
    phases: dict[tuple[int, str], int] = {}
    for (_, nbytes, where), total in zip(changes, totals[1:], strict=True):
        if nbytes > 0:  # a phase that only frees has no peak of its own
            phases[where] = max(phases.get(where, 0), total)
    highest = totals.index(max(totals))
    step, phase = changes[highest - 1][2] if highest else (1, FORWARD)
    taken = {number for number, nbytes, _ in changes[:highest] if nbytes > 0}
    freed = {number for number, nbytes, _ in changes[:highest] if nbytes < 0}
    alive = _gathered(blocks[number] for number in taken - freed | always)
    return Peak(step, phase, totals[highest], phases, alive, counted)


def _gathered(blocks: Iterable[Alive]) -> tuple[Alive, ...]:
    """Allocations of one line and phase as one, the largest first."""
    groups = defaultdict(list)
    for block in blocks:
        groups[block.file, block.line, block.phase].append(block)
    sums = [replace(group[0], bytes=sum(block.bytes for block in group), count=len(group)) for group in groups.values()]
    return tuple(sorted(sums, key=lambda block: -block.bytes))


# -- an allocator asked


def _by_allocator(step, steps: int) -> Peak:
    peaks: dict[tuple[int, str], int] = {}
    marks: list[tuple[int, tuple[int, str]]] = []  # how many allocations there were when a phase ended

    def turn():
        peaks[phases.at] = max(peaks.get(phases.at, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        marks.append((_allocations() - began, phases.at))

    torch.cuda.init()
    base, phases = torch.cuda.memory_allocated(), Phases(turn)
    torch.cuda.reset_peak_memory_stats()
    began = _allocations()
    with _history() as events:
        phases.run(step, steps)
    if not events:
        raise PerflabError("These steps allocated nothing on the device: does step run the model there?")
    at = max(peaks, key=peaks.get)
    changes, blocks = _read(events, marks)
    blocks[-1] = Alive(base, BEFORE, 0, "", "parameters and inputs")
    alive = _peak(changes, base, {-1} if base else set(), blocks, "allocator").alive
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
    changes, blocks, open_at = [], {}, {}
    marks = iter(marks)
    until, where = next(marks)
    for event in events:
        if event["action"] == "alloc":
            number = len(blocks)
            while number >= until:
                until, where = next(marks, (math.inf, where))
            open_at[event["addr"]] = number
            blocks[number] = _block(event, where[1])
            changes.append((number, event["size"], where))
        elif event["action"] == "free_completed" and event["addr"] in open_at:
            number = open_at.pop(event["addr"])
            changes.append((number, -blocks[number].bytes, where))
    return changes, blocks


def _block(event: dict, phase: str) -> Alive:
    """An allocation with the innermost frame of the learner's own code; backward's threads have none."""
    own = (place(frame["filename"], frame["line"]) for frame in event.get("frames", ()) if is_own(frame["filename"]))
    here = next(own, Place())
    return Alive(event["size"], here.file, here.line, here.code, phase)
