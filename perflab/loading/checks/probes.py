"""What runs in DataLoader workers in the learner's dataset's place: it reads for it, and says what it saw.

Workers import this file: torch, numpy and perflab.bench may enter, nothing that draws or teaches.
"""

import contextlib
import itertools
import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .double import pin_threads, told
from .fingerprint import SOURCES, devices, digest, form, global_states, seed
from .reach import generators, lengths, open_things, reach

FORMS = 256  # samples whose form is kept besides their digest
# Libraries whose handles must not be carried over a fork, as their manuals say.
OF_ONE_PROCESS = ("h5py", "lmdb", "netCDF4", "tables", "sqlite3", "_socket", "socket", "psycopg2", "pymysql", "redis")


class Parts:
    """What the learner gave a loader: the dataset and the functions that workers call."""

    def __init__(self, dataset, collate_fn=None, worker_init_fn=None):
        self.dataset, self.collate_fn, self.worker_init_fn = dataset, collate_fn, worker_init_fn

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
        return samples if self.collate_fn is None else self.collate_fn(samples)


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


def census(parts: Parts) -> dict:
    """What this process holds: private bytes, threads and their CPU time, descriptors, lengths of containers."""
    info = get_worker_info()
    return {
        "id": info.id if info else -1,
        "pid": os.getpid(),
        "private_bytes": private_bytes(),
        "threads": _torch_threads(),
        "busy_ns": _busy(),
        "fds": count_fds(),
        "lengths": lengths(parts.roots),
        "open": {path: id(x) for path, x in of_one_process(parts)},
    }


def _torch_threads() -> int:
    return max(getattr(torch.set_num_threads, "asked", 0), torch.get_num_threads())


def private_bytes() -> int:
    """Bytes that this process alone has written; what it shares with its parent, or reads from files, left out."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    except OSError:
        import psutil

        return psutil.Process().memory_full_info().uss


def _busy() -> dict[int, int]:
    """CPU time of each thread of this process, in ns, by its id; empty where the system does not tell."""
    busy = {}
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/self/task/{task}/schedstat") as line:
                busy[int(task)] = int(line.read().split()[0])
    return busy


def count_fds() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0


def of_one_process(parts: Parts) -> Iterator[tuple[str, object]]:
    """Open handles of libraries that forbid their use on both sides of a fork."""
    for path, x in reach(parts.roots):
        if type(x).__module__.partition(".")[0] not in OF_ONE_PROCESS or isinstance(x, type):
            continue
        if isinstance(x, sqlite3.Connection):
            with contextlib.suppress(sqlite3.Error):
                _ = x.total_changes  # raises when closed
                yield path, x
        elif type(x).__name__ in ("File", "Environment", "Dataset") and x:
            yield path, x
    for path, x, _ in open_things(parts.roots):
        if type(x).__module__ in ("socket", "_socket"):
            yield path, x


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
        return first, read(Yielding(parts.dataset, parts.collate_fn), first, keys, sources)

    def draw(self, keys: Sequence, most: int, seconds: float) -> dict:
        return draw(self.parts, keys, most, seconds)

    def again(self, keys: Sequence, times: int) -> int:
        """Read some samples again and again; how many reads that were."""
        return sum(read(self.parts, 0, keys).done for _ in range(times))

    def census(self) -> dict:
        return census(self.parts)

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
        yield "census", census(self.parts)
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
                if not self.alike:
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
        yield "census", census(self.parts)


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
