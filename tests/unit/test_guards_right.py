"""The guards on right loaders, of many kinds: no alarm, and all of them looked at."""

import functools
import mmap
import multiprocessing
import os
import random
import sqlite3
import threading
from collections import OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from perflab.loading.guards import guards
from perflab.loading.images import StagedPhotos

WORDS = ["", "a", "bc", "def ghi", "jkl mno pqr"]


class Plain(Dataset):
    def __init__(self, n=203):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([i, i * i])


class Text(Plain):
    """Ragged, with nothing in some fields."""

    def __getitem__(self, i):
        return {"text": WORDS[i % 5], "ids": list(range(i % 5)), "label": None if i % 7 == 0 else i % 3}


def pad(samples):
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.tensor([s["ids"] + [0] * (longest - len(s["ids"])) for s in samples])
    return {"ids": ids, "text": [s["text"] for s in samples], "label": [s["label"] for s in samples]}


class Sharded(IterableDataset):
    def __init__(self, n=1000):
        self.n = n

    def share(self):
        worker = get_worker_info()
        return range(worker.id, self.n, worker.num_workers) if worker else range(self.n)

    def __iter__(self):
        for i in self.share():
            yield torch.tensor(i), float(np.random.random())  # an augmentation of the global stream


class Shuffled(Sharded):
    """All workers shuffle alike, on purpose, and then share out."""

    def __init__(self):
        super().__init__()
        self.order = random.Random(5)

    def __iter__(self):
        everything = list(range(self.n))
        self.order.shuffle(everything)
        worker = get_worker_info()
        yield from everything[worker.id :: worker.num_workers] if worker else everything


class Lazy(Plain):
    def __init__(self, path, how):
        super().__init__(500)
        self.path, self.how, self.pid, self.file = path, how, None, None

    def __getitem__(self, i):
        if self.how == "pread":
            if self.file is None:
                raise AssertionError
            return os.pread(self.file.fileno(), 8, 8 * i)
        if self.how == "each":
            with open(self.path, "rb") as file:
                file.seek(8 * i)
                return file.read(8)
        if self.pid != os.getpid():
            self.file, self.pid = open(self.path, "rb"), os.getpid()  # noqa: SIM115
        self.file.seek(8 * i)
        return self.file.read(8)


class Mapped(Plain):
    def __init__(self, path):
        super().__init__(500)
        self.rows = np.memmap(path, np.int64)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i])


class Augmented(Plain):
    """Every global stream, at three depths."""

    def __getitem__(self, i):
        noise = torch.randn(3) * np.random.random() + random.random()
        return torch.flip(noise, (0,)) if torch.rand(()) < 0.1 else noise + i


class InWorker(Plain):
    """A generator of its own, made from what torch gives each worker."""

    rng = None

    def __getitem__(self, i):
        if self.rng is None:
            worker = get_worker_info()
            self.rng = np.random.default_rng(worker.seed if worker else 0)
        return i + self.rng.random()


def seeded(worker):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


class ByIndex(Plain):
    """Random by design: the same value for an index, whoever reads it."""

    def __getitem__(self, i):
        return i + np.random.default_rng((3, i)).random()


class ByEpoch(Plain):
    def __init__(self, shared):
        super().__init__()
        self.epoch = torch.zeros((), dtype=torch.int64)
        if shared:
            self.epoch.share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __getitem__(self, i):
        return i, int(self.epoch)


class Cached(Plain):
    """The last 16 samples are kept."""

    def __init__(self):
        super().__init__()
        self.kept = OrderedDict()

    def __getitem__(self, i):
        if i not in self.kept:
            self.kept[i] = torch.full((1000,), float(i))
            if len(self.kept) > 16:
                self.kept.popitem(last=False)
        return self.kept[i].clone()


class CachedByTool(Plain):
    @staticmethod
    @functools.lru_cache(maxsize=32)
    def made(i):
        return float(i)

    def __getitem__(self, i):
        return self.made(i)


class CachedWhole(Plain):
    """Kept for good, but small: it fits."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getitem__(self, i):
        return self.kept.setdefault(i, torch.tensor(i))


class Rows(Plain):
    def __init__(self, path):
        super().__init__(100)
        self.path, self.pid = path, None

    def __getitem__(self, i):
        if self.pid != os.getpid():
            self.db, self.pid = sqlite3.connect(self.path), os.getpid()
        return self.db.execute("select v from t where i = ?", (i,)).fetchone()[0]


class Packed(Plain):
    def __init__(self):
        super().__init__(300_000)
        self.rows = np.array([f"sample-{i:012d}".encode() for i in range(self.n)])

    def __getitem__(self, i):
        return len(self.rows[i])


Point = namedtuple("Point", "x y")


class Thing:
    def __init__(self, i):
        self.i, self.picture = i, Image.new("L", (4, 4), i)


class Things(Plain):
    def __getitem__(self, i):
        return Thing(i)


class Points(Plain):
    def __getitem__(self, i):
        return Point(torch.tensor(i), (np.float32(i), [i, True, None if i else "x"]))


class Grown(Plain):
    """Asked by lists of indices."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class ByPair(Plain):
    def __getitem__(self, pair):
        i, scale = pair
        return torch.tensor(i * scale)


class Pairs(Sampler):
    def __init__(self, n):
        self.n, self.epoch = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.epoch += 1
        return iter([(i, self.epoch) for i in random.sample(range(self.n), self.n)])


class Buckets(Sampler):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n // 10

    def __iter__(self):
        return iter([list(range(i, i + 7 + i // 10 % 4)) for i in range(0, self.n - 10, 10)])


class BufferShuffled(Sharded):
    def __iter__(self):
        held = []
        for i in self.share():
            held.append(i)
            if len(held) > 50:
                yield held.pop(random.randrange(len(held)))
        yield from held


class OfItsSeed(Sharded):
    """A generator of the iteration, from the seed of the worker."""

    def __iter__(self):
        worker = get_worker_info()
        rng = np.random.default_rng(worker.seed if worker else 0)
        for i in self.share():
            yield i + rng.normal()


class Span(IterableDataset):
    """Shared out by worker_init_fn, as torch's documentation does."""

    def __init__(self):
        self.first, self.last = 0, 1000

    def __iter__(self):
        return iter(range(self.first, self.last))


def span(worker):
    info = get_worker_info()
    each = info.dataset.last // info.num_workers
    info.dataset.first, info.dataset.last = worker * each, (worker + 1) * each


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(3)


class MappedFile(Plain):
    def __init__(self, path):
        super().__init__(500)
        self.file = open(path, "rb")  # noqa: SIM115
        self.bytes = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, i):
        return self.bytes[8 * i : 8 * i + 8]


class Header(Lazy):
    """Keeps the file open from which it read the header, and reads samples through others."""

    def __init__(self, path):
        super().__init__(path, "each")
        self.header = open(path, "rb")  # noqa: SIM115
        self.header.read(8)


class Alike(Plain):
    """Deterministic, by a seed at each item."""

    def __getitem__(self, i):
        np.random.seed(42)
        torch.manual_seed(i)
        return i + np.random.random() + torch.rand(())


class Seldom(Plain):
    def __getitem__(self, i):
        return -i if np.random.random() < 0.02 else i


class OfTheEpoch(Plain):
    """Random by index and epoch; the loop calls set_epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def set_epoch(self, epoch):
        if isinstance(self.epoch, int):
            self.epoch = epoch
        else:
            self.epoch.value = epoch

    def __getitem__(self, i):
        return i + np.random.default_rng((int(getattr(self.epoch, "value", self.epoch)), i)).random()


class Recent(Plain):
    def __init__(self):
        super().__init__()
        self.recent, self.lock = deque(maxlen=50), threading.Lock()

    def __getitem__(self, i):
        with self.lock:
            self.recent.append(i)
        return i


class Labels(Plain):
    """A long list of one and the same object."""

    def __init__(self):
        super().__init__(500_000)
        self.labels = ["cat"] * self.n

    def __getitem__(self, i):
        return self.labels[i]


class Virtual(Plain):
    """More indices than any list can hold."""

    def __init__(self):
        super().__init__(10**9)


def mixed(samples):
    return torch.stack(samples) * np.random.random()


class Blocks(Plain):
    """Makes its own batches; the collate function gets one."""

    def __getitem__(self, i):
        return {"x": torch.arange(8) + i}


def doubled(block):
    return {"x": 2 * block["x"]}


def as_is(samples):
    return samples


def rows(tmp_path):
    path = tmp_path / "rows.bin"
    np.arange(500).tofile(path)
    return path


def opened(tmp_path):
    dataset = Lazy(rows(tmp_path), "pread")
    dataset.file = open(dataset.path, "rb")  # noqa: SIM115
    return dataset


def table(tmp_path):
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("create table t (i integer primary key, v integer)")
        db.executemany("insert into t values (?, ?)", [(i, i * i) for i in range(100)])
    return Rows(tmp_path / "a.db")


RIGHT = {
    "shuffled by a buffer": lambda _: (BufferShuffled(), {}),
    "generator of an iteration": lambda _: (OfItsSeed(), {}),
    "shared out by worker_init_fn": lambda _: (Span(), {"worker_init_fn": span}),
    "generator without end": lambda _: (Endless(), {}),
    "mapped file": lambda t: (MappedFile(rows(t)), {}),
    "an open file that is not read": lambda t: (Header(rows(t)), {}),
    "seeded at each item": lambda _: (Alike(), {}),
    "seldom random": lambda _: (Seldom(), {"shuffle": True}),
    "random by epoch": lambda _: (OfTheEpoch(0), {}),
    "epoch in a shared value": lambda _: (OfTheEpoch(multiprocessing.Value("i", 0)), {"persistent_workers": True}),
    "a bounded log and a lock": lambda _: (Recent(), {}),
    "one object many times": lambda _: (Labels(), {}),
    "a billion indices": lambda _: (Virtual(), {"batch_size": 100}),
    "a list": lambda _: (list(range(100)), {}),
    "random collate": lambda _: (Plain(), {"collate_fn": mixed}),
    "its own batches": lambda _: (Blocks(), {"batch_size": None, "collate_fn": doubled}),
    "photos": lambda _: (StagedPhotos(limit=24, side=64), {}),
    "tensors": lambda _: (TensorDataset(torch.randn(1000, 8), torch.arange(1000)), {"shuffle": True}),
    "text": lambda _: (Text(), {"collate_fn": pad}),
    "sharded": lambda _: (Sharded(), {}),
    "shuffled alike, then shared out": lambda _: (Shuffled(), {}),
    "opened in the worker": lambda t: (Lazy(rows(t), "lazily"), {}),
    "opened for each sample": lambda t: (Lazy(rows(t), "each"), {}),
    "read by pread": lambda t: (opened(t), {}),
    "memory map": lambda t: (Mapped(rows(t)), {}),
    "global streams": lambda _: (Augmented(), {"shuffle": True}),
    "generator of the worker": lambda _: (InWorker(), {}),
    "generator by worker_init_fn": lambda _: (InWorker(), {"worker_init_fn": seeded}),
    "random by index": lambda _: (ByIndex(), {}),
    "set_epoch, new workers": lambda _: (ByEpoch(False), {}),
    "set_epoch, shared": lambda _: (ByEpoch(True), {"persistent_workers": True}),
    "bounded cache": lambda _: (Cached(), {}),
    "lru_cache": lambda _: (CachedByTool(), {}),
    "whole cache": lambda _: (CachedWhole(), {"persistent_workers": True}),
    "database opened in the worker": lambda t: (table(t), {}),
    "packed strings": lambda _: (Packed(), {"batch_size": 2000}),
    "objects": lambda _: (Things(), {"collate_fn": as_is}),
    "named tuples": lambda _: (Points(), {"shuffle": True}),
    "batched reads": lambda _: (Grown(), {}),
    "batch sampler": lambda _: (Plain(), {"batch_sampler": Buckets(200)}),
    "keys that are pairs": lambda _: (ByPair(), {"sampler": Pairs(203)}),
    "weighted": lambda _: (Plain(), {"sampler": WeightedRandomSampler(torch.ones(203), 100)}),
    "some indices": lambda _: (Plain(), {"sampler": SubsetRandomSampler([3, 5, 8, 13, 150])}),
    "a batch an index": lambda _: (
        Plain(),
        {"sampler": SequentialSampler(range(40)), "batch_size": None},
    ),
    "parts of parts": lambda _: (Subset(ConcatDataset([Plain(), Plain(50)]), range(0, 250, 3)), {"shuffle": True}),
    "one worker": lambda _: (Augmented(), {"num_workers": 1}),
    "no workers": lambda _: (Plain(), {"num_workers": 0, "multiprocessing_context": None}),
    "own seed": lambda _: (Augmented(), {"generator": torch.Generator().manual_seed(1), "shuffle": True}),
    "pinned": lambda _: (Plain(), {"pin_memory": True}),
    "out of order": lambda _: (Plain(), {"in_order": False}),
}
# What no reading can tell: samples that are new each time, and streams that never end.
UNTOLD = {kind: {"same samples"} for kind in RIGHT if kind.startswith("generator")}
UNTOLD["generator without end"] |= {"none lost or doubled", "last batch"}
QUICK = [
    *("photos", "tensors", "text", "sharded", "opened in the worker", "memory map", "global streams"),
    *("generator of the worker", "set_epoch, shared", "bounded cache"),
]


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def no_alarm(kind, tmp_path):
    dataset, more = RIGHT[kind](tmp_path)
    more = {"num_workers": 2, "multiprocessing_context": "fork"} | more
    if "batch_sampler" not in more:
        more = {"batch_size": 10} | more
    found = guards(DataLoader(dataset, **more))
    assert found.clear, str(found)
    left = {c.guard for c in found.checks if c.state == "not checked"}
    assert left <= UNTOLD.get(kind, set()), [str(found[g]) for g in left]
    return found


@pytest.mark.parametrize("kind", QUICK)
def test_a_right_loader_has_no_alarm(kind, tmp_path):
    no_alarm(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in RIGHT if kind not in QUICK])
def test_another_right_loader_has_no_alarm(kind, tmp_path):
    no_alarm(kind, tmp_path)


@pytest.mark.slow
def test_workers_of_a_fork_server_are_right_too(tmp_path):
    for dataset in (Augmented(), ByEpoch(True)):
        loader = DataLoader(dataset, 10, num_workers=2, multiprocessing_context="forkserver", persistent_workers=True)
        assert guards(loader).clear


def test_a_batch_sampler_keeps_its_state():
    sampler = BatchSampler(Pairs(203), 10, False)
    assert guards(DataLoader(ByPair(), batch_sampler=sampler, num_workers=2, multiprocessing_context="fork")).clear
    assert sampler.sampler.epoch == 0


LOCK = threading.Lock()


class Locked(Plain):
    def __getitem__(self, i):
        with LOCK:
            return i


@pytest.mark.slow
def test_a_lock_held_here_does_not_reach_a_new_process():
    with LOCK:
        found = guards(DataLoader(Locked(), 10, num_workers=2, multiprocessing_context="forkserver"), timeout_s=3)
    assert found.clear and found["same samples"].what.startswith("203 of 203 samples are the same with 1, 2")
