"""Which process and thread runs each stage of a DataLoader, and how long each takes.

Workers import this file: torch may enter, nothing that draws or teaches.
"""

import copy
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from perflab.bench import cleanup, interrupt
from perflab.bench.timing import Samples, samples, synchronize
from perflab.errors import PerflabError

from .rebuild import rebuilt


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


def _noted(dataset: Dataset, stages: Sequence[str], notes: _Notes) -> Dataset:
    """A shallow copy of `dataset` whose named stages are noted; the learner's own stays as it is."""
    twin = copy.copy(dataset)
    for stage in stages:
        function = getattr(twin, stage, None)
        if not callable(function):
            names = [n for n in dir(dataset) if not n.startswith("_") and callable(getattr(dataset, n, None))]
            raise PerflabError(
                f"{type(dataset).__name__} has no method or callable attribute {stage!r} that could be a "
                f"stage: it has {', '.join(names) or 'none'}."
            )
        setattr(twin, stage, partial(notes.call, stage, function))
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

    def __init__(self, data, events: list[Event]):
        self.data, self.events = data, events

    def pin_memory(self):
        notes = _Notes()
        self.data = notes.call("pin", tree_map_only, torch.Tensor, torch.Tensor.pin_memory, self.data)
        self.events += notes.events
        return self


def _collated(notes: _Notes, collate: Callable, items) -> _Batch:
    """A collate function whose batch takes along what this process noted since the last one."""
    data = notes.call("collate", collate, items)
    events, notes.events = notes.events, []
    return _Batch(data, events)


def _drawn(sampler: Iterable, notes: _Notes) -> Iterator:
    """What a sampler draws, each draw noted."""
    start = notes.clock()
    for indices in sampler:
        notes.add("sampler", start, notes.clock())
        yield indices
        start = notes.clock()


def trace(loader: DataLoader, stages: Sequence[str] = (), to: Callable | None = None) -> list[Event]:
    """The events of one epoch of a loader like this one: sampler, the dataset's stages, collate, queue, pin, copy.

    stages: see `stage_times`. `to(batch)`, where given, is noted as "copy" and is waited for. "queue" lasts
    from the end of collate in a worker until the loop has the batch. Nothing is asked of the loader itself.
    Raises PerflabError for what is no DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise PerflabError(f"trace takes a DataLoader, not {type(loader).__name__}: DataLoader(dataset, batch_size=8).")
    with interrupt.Interruptible() as door:
        return door.call(_traced, loader, [stages] if isinstance(stages, str) else stages, to)


def _traced(loader: DataLoader, stages: Sequence[str], to: Callable | None) -> list[Event]:
    there, here = _Notes(), _Notes()
    changes = {
        "dataset": _noted(loader.dataset, stages, there),
        "collate_fn": partial(_collated, there, loader.collate_fn),
        "persistent_workers": False,
    }
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        changes["batch_sampler"] = _drawn(loader.batch_sampler, here)
    batches = iter(rebuilt(loader, **changes))
    events: list[Event] = []
    try:
        for batch in batches:
            arrived = here.clock()
            collate = next(event for event in batch.events if event.stage == "collate")
            if collate.place == "worker processes":
                pinning = sum(event.own_s for event in batch.events if event.stage == "pin")
                events.append(Event("queue", "between processes", "", 0, collate.end_s, arrived, pinning))
            events += batch.events
            if to is not None:
                here.call("copy", _waited, to, batch.data)
    finally:
        cleanup.end_loader_workers(batches)
    return here.events + events


def _waited(to: Callable, data):
    to(data)
    synchronize()


def stage_map(events: Sequence[Event]) -> dict[str, dict]:
    """What `observe` takes: by stage, where it runs, in how many processes, how often, seconds a call (median).

    Processes are told apart by pid. The queue has no process: it is what lies between them.
    """
    last = ["collate", "queue", "pin", "copy"]
    stages = dict.fromkeys(event.stage for event in events)
    own = [stage for stage in stages if stage not in ("sampler", *last)]
    rows = {}
    for stage in filter(stages.__contains__, ["sampler", *own, *last]):
        calls = [event for event in events if event.stage == stage]
        rows[stage] = {
            "runs in": ", ".join(filter(None, [calls[0].place, calls[0].thread])),
            "processes": len({event.pid for event in calls if event.thread}),
            "calls": len(calls),
            "time_s": statistics.median(event.own_s for event in calls),
        }
    return rows
