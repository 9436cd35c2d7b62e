"""Which process and thread runs each stage of a DataLoader, and how long each takes.

Workers import this file: torch may enter, nothing that draws or teaches.
"""

import copy
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from perflab.bench import cleanup, interrupt
from perflab.bench.timing import Samples, samples, synchronize
from perflab.errors import PerflabError

from .rebuild import batches_drawn, rebuilt


class Event(NamedTuple):
    """One call of one stage. Seconds are of the monotonic clock, which all processes of a machine share."""

    stage: str
    place: str  # "main process" or "worker processes"
    thread: str  # "main thread" or "pinning thread"
    pid: int
    start_s: float
    end_s: float
    inner_s: float = 0.0  # of other stages that ran inside

    @property
    def own_s(self) -> float:
        return self.end_s - self.start_s - self.inner_s


class _Notes:
    """Where the events of one process are noted. A stage inside another one is taken out of the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.events: list[Event] = []
        self.inner: list[float] = []

    def call(self, stage: str, function: Callable, *args, **named):
        self.inner.append(0.0)
        start = self.clock()
        try:
            return function(*args, **named)
        finally:
            end, inner = self.clock(), self.inner.pop()
            if self.inner:
                self.inner[-1] += end - start
            self.add(stage, start, end, inner)

    def add(self, stage: str, start: float, end: float, inner: float = 0.0):
        place = "main process" if get_worker_info() is None else "worker processes"
        main = threading.current_thread() is threading.main_thread()
        thread = "main thread" if main else "pinning thread"
        self.events.append(Event(stage, place, thread, os.getpid(), start, end, inner))

    def taken(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class _Noted:
    """A stage of a dataset in place of the method or the callable attribute of that name."""

    def __init__(self, notes: _Notes, owner: Dataset, name: str):
        self.notes, self.owner, self.name = notes, owner, name
        self.attribute = vars(owner).get(name)

    def __call__(self, *args, **named):
        if self.attribute is not None:
            return self.notes.call(self.name, self.attribute, *args, **named)
        method = getattr(type(self.owner), self.name)
        return self.notes.call(self.name, method.__get__(self.owner), *args, **named)


def _noted(dataset: Dataset, stages: Sequence[str], notes: _Notes) -> Dataset:
    """A shallow copy of `dataset` whose named stages are noted; the learner's own stays as it is."""
    for name in stages:
        if not callable(getattr(dataset, name, None)):
            have = [n for n in dir(dataset) if not n.startswith("_") and callable(getattr(dataset, n, None))]
            raise PerflabError(
                f"{type(dataset).__name__} has no method or callable attribute {name!r} that could be a "
                f"stage: it has {', '.join(have) or 'none'}."
            )
    twin = copy.copy(dataset)
    for name in stages:
        setattr(twin, name, _Noted(notes, twin, name))
    return twin


def stage_times(
    dataset: Dataset,
    stages: Sequence[str],
    indices: Iterable[int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Seconds that each stage of one item takes, the mean over `indices` (all without): read_s, decode_s, ...

    stages: names of methods of the dataset, or of attributes that are called ("transform"). A stage that
    calls another one does not include it. `item_s` is the whole item.
    clock: `time.thread_time` for processor seconds, which neither sleep nor a busy machine lengthens.
    Raises PerflabError for a stage that the dataset does not have.
    """
    stages = [stages] if isinstance(stages, str) else stages
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not by_index or (indices is None and not hasattr(dataset, "__len__")):
        raise PerflabError(
            f"stage_times asks a dataset for items by index, which {type(dataset).__name__} does not offer: "
            "give it a map-style dataset, and indices if that has no length."
        )
    notes = _Notes(clock)
    twin = _noted(dataset, stages, notes)
    indices = range(len(dataset)) if indices is None else list(indices)
    for i in indices:
        notes.call("item", twin.__getitem__, i)
    spent = dict.fromkeys([*stages, "item"], 0.0)
    for event in notes.events:
        spent[event.stage] += event.end_s - event.start_s if event.stage == "item" else event.own_s
    return samples(**{f"{stage}_s": s / max(1, len(indices)) for stage, s in spent.items()})


class _Batch:
    """A batch with the events that made it. DataLoader calls `pin_memory` where it pins."""

    def __init__(self, data, notes: _Notes):
        self.data, self.notes = data, notes

    def pin_memory(self):
        self.data = self.notes.call("pin", _pinned, self.data)
        return self


def _pinned(data):
    if isinstance(data, torch.Tensor):
        return data.pin_memory()
    if isinstance(data, dict):
        return {key: _pinned(x) for key, x in data.items()}
    return [_pinned(x) for x in data] if isinstance(data, list | tuple) else data


class _Collate:
    def __init__(self, collate: Callable, notes: _Notes):
        self.collate, self.notes = collate, notes

    def __call__(self, items) -> _Batch:
        data = self.notes.call("collate", self.collate, items)
        mine = _Notes()
        mine.events = self.notes.taken()
        return _Batch(data, mine)


class _Drawn:
    """A sampler whose draws are noted. It stays in the main process."""

    def __init__(self, sampler, notes: _Notes):
        self.sampler, self.notes = sampler, notes

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        drawn = iter(self.sampler)
        while True:
            start = self.notes.clock()
            try:
                indices = next(drawn)
            except StopIteration:
                return
            self.notes.add("sampler", start, self.notes.clock())
            yield indices


def trace(loader: DataLoader, stages: Sequence[str] = (), to: Callable | None = None) -> list[Event]:
    """The events of one epoch of a loader like this one: sampler, the dataset's stages, collate, queue, pin, copy.

    stages: see `stage_times`. `to(batch)`, where given, is noted as "copy" and is waited for. "queue" lasts
    from the end of collate in a worker until the loop has the batch. Nothing is asked of the loader itself.
    Raises PerflabError for what is no DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise PerflabError(f"trace takes a DataLoader, not {type(loader).__name__}: DataLoader(dataset, batch_size=8).")
    with interrupt.Interruptible() as door:
        return door.call(_traced, loader, stages, to)


def _traced(loader: DataLoader, stages: Sequence[str], to: Callable | None) -> list[Event]:
    stages = [stages] if isinstance(stages, str) else stages
    there, here = _Notes(), _Notes()
    changes = {
        "dataset": _noted(loader.dataset, stages, there),
        "collate_fn": _Collate(loader.collate_fn, there),
        "persistent_workers": False,
    }
    if (sampler := batches_drawn(loader)) is not None:
        changes["batch_sampler"] = _Drawn(sampler, here)
    noted = iter(rebuilt(loader, **changes))
    events: list[Event] = []
    try:
        for batch in noted:
            arrived = here.clock()
            made = batch.notes.taken()
            collated = next(e for e in made if e.stage == "collate")
            if collated.place == "worker processes":
                pinning = sum(e.own_s for e in made if e.stage == "pin")
                events.append(Event("queue", "between processes", "", 0, collated.end_s, arrived, pinning))
            events += made
            if to is not None:
                here.call("copy", _waited, to, batch.data)
    finally:
        cleanup.end_loader_workers(noted)
    return here.taken() + events


def _waited(to: Callable, data):
    to(data)
    synchronize()


def stage_map(events: Sequence[Event]) -> dict[str, dict]:
    """What `observe` takes: by stage, where it runs, in how many processes, how often, seconds a call (median).

    Processes are told apart by pid. The queue has no process: it is what lies between them.
    """
    order = dict.fromkeys(["sampler", *(e.stage for e in events if e.stage not in _LAST), *_LAST])
    rows = {}
    for stage in order:
        mine = [e for e in events if e.stage == stage]
        if mine:
            place = f"{mine[0].place}, {mine[0].thread}" if mine[0].thread else mine[0].place
            processes = {e.pid for e in mine if e.thread}
            time_s = statistics.median(e.own_s for e in mine)
            rows[stage] = {"runs in": place, "processes": len(processes), "calls": len(mine), "time_s": time_s}
    return rows


_LAST = ("collate", "queue", "pin", "copy")
