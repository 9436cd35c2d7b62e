"""What runs in DataLoader workers in the learner's dataset's place: it reads for it, and says what it saw.

Workers import this file: torch, numpy and perflab.bench may enter, nothing that draws or teaches.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .census import census, running
from .digest import SOURCES, devices, digest, form, global_states, seed
from .double import pin_threads, told
from .walk import generators, reach

FIRST = 16  # samples of a stream after each of which its generators are looked at
FORMS = 256  # samples whose form is kept besides their digest


class Parts:
    """What the learner gave a loader: the dataset and the functions that workers call."""

    def __init__(self, dataset, collate_fn=None, worker_init_fn=None, batches: bool = True):
        self.dataset, self.collate_fn, self.worker_init_fn = dataset, collate_fn, worker_init_fn
        self.batches = batches  # or does the dataset make its own

    @property
    def roots(self) -> dict[str, object]:
        """Where a walk over all that they carry begins, with the names that a reader knows."""
        roots = {type(self.dataset).__name__: self.dataset}
        for name in ("collate_fn", "worker_init_fn"):
            if getattr(self, name) is not None:
                roots[name] = getattr(self, name)
        return roots

    def item(self, key):
        """One sample, as torch's own fetcher asks for it."""
        if hasattr(self.dataset, "__getitems__") and self.dataset.__getitems__:
            return self.dataset.__getitems__([key])[0]
        return self.dataset[key]

    def batch(self, samples: list):
        """What the loader makes of samples; of the first alone where it makes no batches."""
        whole = samples if self.batches else samples[0]
        return whole if self.collate_fn is None else self.collate_fn(whole)


class Read:
    """Digests of the samples of `keys`, in their order; 0 where reading failed, with the reason in `errors`."""

    def __init__(self, n: int):
        self.digests = np.zeros(n, np.uint64)
        self.forms: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.done = 0
        self.seconds = 0.0


def read(parts: Parts, first: int, keys: Sequence, sources=SOURCES, until: float = np.inf) -> Read:
    """Read and digest, each sample with the global streams `sources` started from its place, `first` + k."""
    seen = Read(len(keys))
    began = time.perf_counter()
    for k, key in enumerate(keys):
        if sources:
            seed(first + k, sources)
        try:
            sample = parts.item(key)
            seen.digests[k] = digest(sample)
            if first + k < FORMS:
                seen.forms[first + k] = form(sample)
        except Exception as fault:
            seen.errors[first + k] = told(fault)
        seen.done = k + 1
        if time.perf_counter() - began > until:
            break
    seen.seconds = time.perf_counter() - began
    return seen


class Yielding(Parts):
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


def draw(parts: Parts, keys: Sequence, most: int, seconds: float) -> dict:
    """The same samples again and again: where the random streams stand, which of them move, what comes out.

    `own` are digests with the global streams started alike each time: they differ where generators of the
    dataset's own do. The samples go through the collate function, which may draw too.
    """
    info = get_worker_info()
    out = {"id": info.id if info else -1, "after": {}, "moved": [], "own": [], "error": ""}

    def once():
        return digest(parts.batch([parts.item(key) for key in keys]))

    def states():
        return global_states() | generators(parts.roots)

    try:
        once()
        out["after"] = states()
        once()
        later = states()
        out["moved"] = [name for name, state in out["after"].items() if later.get(name) != state]
        until = time.perf_counter() + seconds
        while len(out["own"]) < most and (len(out["own"]) < 4 or time.perf_counter() < until):
            seed(0)
            out["own"].append(once())
    except Exception as fault:
        out["error"] = told(fault)
    return out


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

    def read(self, first: int, keys: Sequence, sources) -> tuple[int, Read]:
        return first, read(self.parts, first, keys, sources)

    def read_yielding(self, first: int, keys: Sequence, sources) -> tuple[int, Read]:
        parts = self.parts
        return first, read(Yielding(parts.dataset), first, keys, sources)

    def draw(self, keys: Sequence, most: int, seconds: float) -> dict:
        return draw(self.parts, keys, most, seconds)

    def again(self, keys: Sequence, times: int) -> tuple[int, int]:
        """Read some samples again and again: how many reads that were, and how many threads ran at once."""
        with running() as at_once:
            reads = sum(read(self.parts, 0, keys).done for _ in range(times))
        return reads, sorted(at_once)[int(0.6 * len(at_once))] if len(at_once) > 4 else 1

    def census(self) -> dict:
        return census(self.parts.roots)

    def epochs(self) -> list[Mapping[str, int]]:
        """What the objects with a set_epoch hold in this process."""
        return [attributes(x) for _, x in with_epoch(self.parts)]


class ProbeStream(IterableDataset):
    """Stands where an iterable dataset stood: yields (name, what was seen), the samples themselves never.

    With `alike` the global streams start alike before each sample, so that random changes to a sample are
    the same whoever reads it, and digests can be compared between workers. Not before a worker's first: a
    stream may shuffle there, and each worker in its own way.
    """

    def __init__(self, parts: Parts, alike: bool, most: int, seconds: float):
        self.parts, self.alike, self.most, self.seconds = parts, alike, most, seconds

    def __iter__(self):
        info = get_worker_info()
        who = info.id if info else -1
        yield "census", census(self.parts.roots)
        seen, forms, kinds, states = [], [], set(), []
        began = sent = time.perf_counter()
        ended, error = False, ""
        try:
            stream = iter(self.parts.dataset)
            roots = self.parts.roots | {"__iter__": stream}
            while len(seen) < self.most and time.perf_counter() - began < self.seconds:
                if self.alike and (seen or info is None):
                    seed(0)
                sample = next(stream)
                seen.append(digest(sample))
                if len(forms) < FORMS:
                    forms.append(form(sample))
                    kinds |= devices(sample)
                if len(seen) <= FIRST:
                    states.append(global_states() | generators(roots))
                if time.perf_counter() - sent > 0.5:
                    sent = time.perf_counter()
                    yield "at", len(seen)
        except StopIteration:
            ended = True
        except Exception as fault:
            error = told(fault)
        yield (
            "stream",
            {
                "id": who,
                "digests": np.array(seen, np.uint64),
                "forms": forms,
                "devices": kinds,
                "ended": ended,
                "error": error,
                "after": states[0] if states else {},
                "moved": [name for name in states[0] if any(s.get(name) != states[0][name] for s in states[1:])]
                if states
                else [],
                "seconds": time.perf_counter() - began,
            },
        )
        yield "census", census(self.parts.roots)


def with_epoch(parts: Parts) -> list[tuple[str, object]]:
    """(path, object) of all in the dataset that has a set_epoch, in one order in every process."""
    roots = {type(parts.dataset).__name__: parts.dataset}
    return [(path, x) for path, x in reach(roots) if not isinstance(x, type) and callable(getattr(x, "set_epoch", 0))]


def attributes(x) -> Mapping[str, int]:
    """A digest of each attribute of an object, shared memory by what it holds."""
    found = {}
    for name, value in list(getattr(x, "__dict__", {}).items()):
        with contextlib.suppress(Exception):
            held = getattr(value, "value", value)  # of a Value shared between processes
            if isinstance(held, int | float | str | torch.Tensor | np.ndarray):
                found[name] = digest(held)
    return found
