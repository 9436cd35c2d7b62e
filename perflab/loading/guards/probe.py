"""What runs in DataLoader workers in the learner's dataset's place: it reads for it, and says what it saw.

Workers import this file: torch, numpy and perflab.bench may enter, nothing that draws or teaches.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from perflab.bench.fork import pin_threads
from perflab.errors import first_line

from .digest import SOURCES, devices, digest, form, global_states, seed
from .resources import Census, census, counting_threads, worker_number
from .walk import generators, reach

FIRST = 16  # samples of a stream after each of which its generators are looked at
FORMS = 256  # samples whose form is kept besides their digest
HEARTBEAT_S = 0.5


class Parts:
    """What the learner gave a loader: the dataset and the functions that workers call."""

    def __init__(self, dataset, collate_fn=None, worker_init_fn=None, batches: bool = True):
        self.dataset, self.collate_fn, self.worker_init_fn = dataset, collate_fn, worker_init_fn
        self.batches = batches  # or does the dataset make its own

    @property
    def roots(self) -> dict[str, object]:
        """Where a walk over all that they carry begins, with the names that a reader knows."""
        functions = {"collate_fn": self.collate_fn, "worker_init_fn": self.worker_init_fn}
        named = {name: function for name, function in functions.items() if function is not None}
        return {type(self.dataset).__name__: self.dataset} | named

    def item(self, key):
        """One sample, as torch's own fetcher asks for it."""
        if hasattr(self.dataset, "__getitems__") and self.dataset.__getitems__:
            return self.dataset.__getitems__([key])[0]
        return self.dataset[key]

    def batch(self, samples: list):
        """What the loader makes of samples; of the first alone where it makes no batches."""
        whole = samples if self.batches else samples[0]
        return whole if self.collate_fn is None else self.collate_fn(whole)

    def epoch_owners(self) -> list[tuple[str, object]]:
        """(path, object) of all in the dataset that has a set_epoch, in one order in every process."""
        reached = reach({type(self.dataset).__name__: self.dataset})
        return [(path, x) for path, x in reached if not isinstance(x, type) and callable(getattr(x, "set_epoch", 0))]

    def epoch_attributes(self) -> list[dict[str, int]]:
        """What the objects with a set_epoch hold in this process."""
        return [_attribute_digests(x) for _, x in self.epoch_owners()]

    def set_epoch(self) -> str:
        """Call every set_epoch of the dataset with an epoch that it is not in; the error's words, if it fails."""
        try:
            for _, x in self.epoch_owners():
                before = _attribute_digests(x)
                x.set_epoch(1)
                if _attribute_digests(x) == before:
                    x.set_epoch(2)
        except Exception as error:
            return first_line(error)
        return ""


def _attribute_digests(x) -> dict[str, int]:
    """A digest of each attribute of an object, shared memory by what it holds."""
    digests = {}
    for name, value in list(getattr(x, "__dict__", {}).items()):
        with contextlib.suppress(Exception):
            content = getattr(value, "value", value)  # of a Value shared between processes
            if isinstance(content, int | float | str | torch.Tensor | np.ndarray):
                digests[name] = digest(content)
    return digests


@dataclass
class Read:
    """Digests of the samples from place `first` on; 0 where reading failed, with the reason in `errors`."""

    first: int = 0
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    forms: dict[int, str] = field(default_factory=dict)  # by place, as the errors
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return len(self.digests)

    @classmethod
    def joined(cls, reads: Sequence["Read"]) -> "Read":
        """Readings of neighbouring places as one."""
        whole = cls(digests=np.concatenate([read.digests for read in reads]))
        for read in reads:
            whole.errors |= read.errors
            whole.forms |= read.forms
            whole.seconds += read.seconds
        return whole


def read(parts: Parts, first: int, keys: Sequence, sources=SOURCES, until: float = np.inf) -> Read:
    """Read and digest, each sample with the global streams `sources` started from its place, `first` + k."""
    reading, digests = Read(first), []
    began = time.perf_counter()
    for place, key in enumerate(keys, first):
        if sources:
            seed(place, sources)
        digests.append(0)
        try:
            sample = parts.item(key)
            digests[-1] = digest(sample)
            if place < FORMS:
                reading.forms[place] = form(sample)
        except Exception as error:
            reading.errors[place] = first_line(error)
        if time.perf_counter() - began > until:
            break
    reading.digests = np.array(digests, np.uint64)
    reading.seconds = time.perf_counter() - began
    return reading


class RaceProvoker(Parts):
    """Gives way to another process after half of all calls within an item: two that share an offset will meet."""

    def item(self, key):
        turn = itertools.count()

        def give_way(frame, event, argument):
            if event in ("c_return", "return") and next(turn) % 2:
                os.sched_yield()

        sys.setprofile(give_way)
        try:
            return super().item(key)
        finally:
            sys.setprofile(None)


@dataclass
class Draws:
    """Where a worker's random streams stand after a sample (`after`), and which of them a further sample moves.

    `own` are digests of the same samples with the global streams started alike each time: they differ where
    generators of the dataset's own do.
    """

    worker: int = field(default_factory=worker_number)
    after: dict[str, int] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    error: str = ""

    def compare(self, states: Sequence[dict[str, int]]):
        """Note where the streams stood first, and which stood elsewhere later."""
        if states:
            self.after = states[0]
            self.moved = [name for name, state in states[0].items() if any(s.get(name) != state for s in states[1:])]


def draw(parts: Parts, keys: Sequence, most: int, seconds: float) -> Draws:
    """Read the same samples again and again, through the collate function too, which may draw as well."""
    draws = Draws()

    def batch_digest():
        return digest(parts.batch([parts.item(key) for key in keys]))

    try:
        states = []
        for _ in range(2):
            batch_digest()
            states.append(global_states() | generators(parts.roots))
        draws.compare(states)
        until = time.perf_counter() + seconds
        while len(draws.own) < most and (len(draws.own) < 4 or time.perf_counter() < until):
            seed(0)
            draws.own.append(batch_digest())
    except Exception as error:
        draws.error = first_line(error)
    return draws


class Init:
    """The learner's worker_init_fn, which meets the learner's dataset in get_worker_info(), not ours."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def __call__(self, worker: int):
        pin_threads()
        object.__setattr__(get_worker_info(), "dataset", self.parts.dataset)
        if self.parts.worker_init_fn is not None:
            self.parts.worker_init_fn(worker)


class Probe(Dataset):
    """Stands where a map-style dataset stood. An index is a command: (name, what it needs)."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def __getitem__(self, command):
        name, *needs = command
        return name, getattr(self, name)(*needs)

    def read(self, first: int, keys: Sequence, sources) -> Read:
        return read(self.parts, first, keys, sources)

    def read_yielding(self, first: int, keys: Sequence, sources) -> Read:
        return read(RaceProvoker(self.parts.dataset), first, keys, sources)

    def draw(self, keys: Sequence, most: int, seconds: float) -> Draws:
        return draw(self.parts, keys, most, seconds)

    def again(self, keys: Sequence, times: int) -> tuple[int, int]:
        """Read some samples again and again: how many reads that were, and how many threads ran at once."""
        with counting_threads() as running:
            reads = sum(read(self.parts, 0, keys).done for _ in range(times))
        return reads, sorted(running)[int(0.6 * len(running))] if len(running) > 4 else 1

    def census(self) -> Census:
        return census(self.parts.roots)

    def epochs(self) -> list[dict[str, int]]:
        return self.parts.epoch_attributes()


@dataclass
class StreamRead(Draws):
    """Digests of a stream's samples in their order, and whether it ended or broke off with an error."""

    digests: list[int] | np.ndarray = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    ended: bool = False
    seconds: float = 0.0


class ProbeStream(IterableDataset):
    """Stands where an iterable dataset stood: yields (name, what was seen), the samples themselves never.

    With `alike` the global streams start alike before each sample, so that random changes to a sample are
    the same whoever reads it, and digests can be compared between workers. Not before a worker's first: a
    stream may shuffle there, and each worker in its own way.
    """

    def __init__(self, parts: Parts, alike: bool, most: int, seconds: float):
        self.parts, self.alike, self.most, self.seconds = parts, alike, most, seconds

    def __iter__(self) -> Iterator[tuple[str, object]]:
        yield "census", census(self.parts.roots)
        reading, states = StreamRead(), []
        began = sent = time.perf_counter()
        try:
            stream = iter(self.parts.dataset)
            while len(reading.digests) < self.most and time.perf_counter() - began < self.seconds:
                if self.alike and (reading.digests or reading.worker < 0):
                    seed(0)
                sample = next(stream)
                reading.digests.append(digest(sample))
                if len(reading.digests) <= FIRST:
                    reading.devices |= devices(sample)
                    states.append(global_states() | generators(self.parts.roots | {"__iter__": stream}))
                if time.perf_counter() - sent > HEARTBEAT_S:
                    sent = time.perf_counter()
                    yield "heartbeat", None
        except StopIteration:
            reading.ended = True
        except Exception as error:
            reading.error = first_line(error)
        reading.compare(states)
        reading.digests = np.array(reading.digests, np.uint64)
        reading.seconds = time.perf_counter() - began
        yield "stream", reading
        yield "epochs", self.parts.epoch_attributes()
        yield "census", census(self.parts.roots)
