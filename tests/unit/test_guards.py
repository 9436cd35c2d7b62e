"""The guards on wrong loaders: each fault is planted, and must be named by its guard."""

import faulthandler
import functools
import io
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from perflab import PerflabError
from perflab.loading.guards import RULES, guards

N = 20_000
WIDTH = 64


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader(dataset, workers=2, **more):
    more = {"batch_size": 16, "multiprocessing_context": "fork"} | more
    return DataLoader(dataset, num_workers=workers, **more)


def alarms(found):
    return {alarm.about for alarm in found.alarms}


def states(found):
    return {check.guard: check.state for check in found.checks}


class Plain(Dataset):
    def __init__(self, n=200):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([i, i * i])


# -- samples


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "records.bin"
    path.write_bytes(b"".join(struct.pack("q", i).ljust(WIDTH, b"\0") for i in range(N)))
    return path


class Records(Dataset):
    """Opened before the fork: all workers move one offset. Dense when it yields, rare when it does not."""

    def __init__(self, path, dense):
        self.file, self.dense = open(path, "rb", buffering=0), dense  # noqa: SIM115

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.file.seek(i * WIDTH)
        if self.dense:
            os.sched_yield()
        return torch.tensor(struct.unpack("q", self.file.read(WIDTH)[:8].ljust(8, b"\xff"))[0])


@pytest.mark.parametrize("dense", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_shared_file_offset_is_named(records, dense):
    dataset = Records(records, dense)
    dataset.file.seek(640)
    found = guards(loader(dataset))
    assert {"file handles", "same samples"} <= alarms(found)
    assert "Records.file" in found["file handles"].what and "records.bin" in found["file handles"].what
    assert dataset.file.tell() == 640  # and the learner's file stands where it stood
    with pytest.raises(PerflabError, match=r"file handles.*Records\.file"):
        found.require()


class Rare(Plain):
    def __getitem__(self, i):
        return torch.tensor(-1 if get_worker_info() and i in (17, 9_000, 19_999) else i)


def test_three_samples_of_20000_are_found():
    found = guards(loader(Rare(N)))
    assert found["same samples"].state == "ALARM"
    assert (
        found["same samples"].what.startswith("3 of 20,000 samples differ") and "index 17" in found["same samples"].what
    )


class Zipped(Dataset):
    def __init__(self, path):
        self.zip = zipfile.ZipFile(path)
        self.names = self.zip.namelist()

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return len(self.zip.read(self.names[i]))


@pytest.mark.slow
def test_an_archive_opened_before_the_fork_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        for i in range(100):
            out.writestr(f"{i}.txt", os.urandom(1000 + i))
    found = guards(loader(Zipped(tmp_path / "a.zip")))
    assert "file handles" in alarms(found) and "Zipped.zip" in found["file handles"].what


class Rows(Dataset):
    def __init__(self, path):
        self.db = sqlite3.connect(path)

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return self.db.execute("select v from t where i = ?", (i,)).fetchone()[0]


@pytest.mark.slow
def test_a_database_opened_before_the_fork_is_named(tmp_path):
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("create table t (i integer primary key, v integer)")
        db.executemany("insert into t values (?, ?)", [(i, i * i) for i in range(100)])
    found = guards(loader(Rows(tmp_path / "a.db")))
    assert alarms(found) == {"file handles"} and "Rows.db" in found["file handles"].what


class Numbers(IterableDataset):
    def __init__(self, n=1000, share=lambda n, w: range(n)):
        self.n, self.share = n, share

    def __iter__(self):
        worker = get_worker_info()
        return iter(self.share(self.n, worker) if worker else range(self.n))


def overlapping(n, w):
    each = n // w.num_workers
    return range(w.id * each, min(n, (w.id + 1) * each + 10))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (lambda n, w: range(n), "1,000 too many"),
        (overlapping, "10 too many"),
        (lambda n, w: range(w.id * (n // w.num_workers), (w.id + 1) * (n // w.num_workers)), "lose 1 of 1,001"),
        (lambda n, w: range(w.id, n - 100, w.num_workers), "lose 100 of 1,001"),
    ],
)
def test_doubled_and_lost_samples_are_counted(share, words):
    n = 1001 if "1,001" in words else 1000
    found = guards(loader(Numbers(n, share)))
    assert "none lost or doubled" in alarms(found) and words in found["none lost or doubled"].what


class Endless(IterableDataset):
    def __iter__(self):
        i = 0
        while True:
            yield i
            i += 1


@pytest.mark.slow
def test_an_endless_stream_that_all_workers_read_is_doubled():
    found = guards(loader(Endless()))
    assert "none lost or doubled" in alarms(found)
    assert found["same samples"].state == "not checked"


# -- random streams and epochs


class Noisy(Plain):
    def __init__(self, generator):
        super().__init__()
        self.inner = {"steps": [generator]}

    def __getitem__(self, i):
        g = self.inner["steps"][0]
        if isinstance(g, torch.Generator):
            own = torch.rand((), generator=g).item()
        else:
            own = g.random() if not isinstance(g, functools.partial) else g().random()
        return torch.tensor([i, own, np.random.random()])


MODULE_WIDE = np.random.default_rng(1)


def made(kind):
    return {
        "numpy": lambda: np.random.default_rng(7),
        "numpy unseeded": np.random.default_rng,
        "legacy": lambda: np.random.RandomState(3),
        "random": lambda: random.Random(5),
        "torch": lambda: torch.Generator().manual_seed(2),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["numpy", *(pytest.param(k, marks=pytest.mark.slow) for k in ("numpy unseeded", "legacy", "random", "torch"))],
)
def test_a_generator_made_before_the_workers_is_named(kind):
    dataset = Noisy(made(kind))
    found = guards(loader(dataset))
    assert alarms(found) == {"random streams"}
    assert "Noisy.inner['steps'][0]" in found["random streams"].what
    assert "2 workers draw the same" in found["random streams"].what
    assert found["same samples"].state == "not checked"


class ModuleNoise(Plain):
    def __getitem__(self, i):
        return i + MODULE_WIDE.random()


def same_seed(worker):
    np.random.seed(0)


def seed_by_worker(worker):
    np.random.seed(worker)


class Flip(Plain):
    def __getitem__(self, i):
        return i * (1 if np.random.random() < 0.5 else -1)


@pytest.mark.slow
def test_a_generator_of_the_module_is_found():
    assert alarms(guards(loader(ModuleNoise()))) == {"random streams"}


@pytest.mark.slow
def test_workers_seeded_alike_are_found():
    found = guards(loader(Flip(), worker_init_fn=same_seed))
    assert alarms(found) == {"random streams"} and "numpy.random" in found["random streams"].what


@pytest.mark.slow
def test_epochs_seeded_alike_are_found():
    found = guards(loader(Flip(), worker_init_fn=seed_by_worker))
    assert alarms(found) == {"random streams"} and "Each epoch" in found["random streams"].what
    assert guards(loader(Flip(), worker_init_fn=seed_by_worker, persistent_workers=True)).clear


class ByEpoch(Plain):
    def __init__(self):
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return torch.tensor([i, self.epoch])


class Inside(Plain):
    def __init__(self):
        super().__init__()
        self.inner = ByEpoch()

    def __getitem__(self, i):
        return self.inner[i]


@pytest.mark.parametrize("kind", [ByEpoch, pytest.param(Inside, marks=pytest.mark.slow)])
def test_an_epoch_that_persistent_workers_do_not_see_is_named(kind):
    dataset = kind()
    found = guards(loader(dataset, persistent_workers=True))
    assert alarms(found) == {"set_epoch"} and "set_epoch of" in found["set_epoch"].what
    assert (dataset.epoch if kind is ByEpoch else dataset.inner.epoch) == 0


# -- what workers hold


class Strings(Plain):
    def __init__(self):
        super().__init__(1_000_000)
        self.rows = [f"sample-{i:012d}" for i in range(self.n)]

    def __getitem__(self, i):
        return len(self.rows[i])


def test_a_long_list_of_strings_is_named():
    found = guards(loader(Strings(), batch_size=2000))
    assert alarms(found) == {"memory growth"} and "Strings.rows" in found["memory growth"].what


class Hoard(Plain):
    def __init__(self):
        super().__init__()
        self.kept = []

    def __getitem__(self, i):
        self.kept.append(torch.zeros(100))
        return i


def test_a_list_that_grows_with_each_sample_is_named():
    dataset = Hoard()
    found = guards(loader(dataset))
    assert alarms(found) == {"memory growth"} and "Hoard.kept" in found["memory growth"].what
    assert not dataset.kept


class Opens(Plain):
    opened = []  # noqa: RUF012

    def __getitem__(self, i):
        self.opened.append(os.open(os.devnull, os.O_RDONLY))
        return i


@pytest.mark.slow
def test_descriptors_left_open_by_each_sample_are_named():
    assert "descriptors" in alarms(guards(loader(Opens())))


def four(worker):
    torch.set_num_threads(4)


class FourInside(Plain):
    def __getitem__(self, i):
        torch.set_num_threads(4)
        return torch.ones(64, 64) @ torch.ones(64, 64)


def test_four_threads_a_worker_are_named(monkeypatch):
    monkeypatch.setattr("perflab.bench.machine.cores", lambda: 2)
    for wrong in (loader(Plain(), worker_init_fn=four), loader(FourInside())):
        found = guards(wrong)
        assert alarms(found) == {"threads"} and found["threads"].what.startswith("4 threads a worker")
    monkeypatch.setattr("perflab.bench.machine.cores", lambda: 16)
    assert guards(loader(Plain(), worker_init_fn=four)).clear


class Keeping(DataLoader):
    def __iter__(self):
        self.kept = []
        for batch in super().__iter__():
            self.kept.append(batch)
            yield batch


@pytest.mark.slow
def test_a_loader_that_keeps_its_batches_is_named():
    found = guards(Keeping(Plain(2000), batch_size=16, num_workers=2, multiprocessing_context="fork"))
    assert alarms(found) == {"descriptors"}


def test_a_loop_that_keeps_its_batches_is_named():
    kept = []
    wrong = loader(Plain(2000))
    assert "descriptors" in alarms(guards(wrong, step=kept.append)) and not kept
    assert guards(wrong, step=lambda batch: kept.append(batch.clone())).clear


@pytest.mark.slow
def test_batches_kept_by_this_process_are_named():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = list(loader(Plain(2000)))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert "descriptors" in alarms(guards(loader(Plain())))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del kept


@pytest.mark.slow
def test_a_low_limit_is_named_where_an_epoch_would_not_fit_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert alarms(guards(loader(Plain(1000), batch_size=2))) == {"descriptors"}
        assert guards(loader(Plain(1000), batch_size=20)).clear
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_step_that_fails_is_told():
    def step(batch):
        raise ZeroDivisionError("no model")

    found = guards(loader(Plain()), step=step)
    assert found["descriptors"].state == "not checked" and "no model" in found["descriptors"].what


class Lists(Plain):
    def __getitem__(self, i):
        return [float(i)] * 3000


@pytest.mark.slow
def test_a_batch_of_thousands_of_tensors_is_named():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        found = guards(loader(Lists()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert alarms(found) == {"descriptors"} and "3,000 separate tensors" in found["descriptors"].what


# -- start methods and devices


class Transformed(Plain):
    def __init__(self, transform):
        super().__init__()
        self.steps = {"first": [transform]}

    def __getitem__(self, i):
        return self.steps["first"][0](i)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_lambda_is_named_where_workers_do_not_inherit_it(method):
    found = guards(loader(Transformed(lambda x: x), multiprocessing_context=method))
    assert alarms(found) == {"pickling"} and "Transformed.steps['first'][0]" in found["pickling"].what
    assert "lambda" in found["pickling"].what


@pytest.mark.slow
def test_a_lambda_is_fine_where_workers_are_forked():
    found = guards(loader(Transformed(lambda x: x), collate_fn=lambda x: x))
    assert found.clear and "forkserver" in found["pickling"].what


@pytest.mark.slow
def test_a_class_of_a_notebook_is_named():
    """A program that comes with -c has a __main__ without a file, as a notebook's kernel has."""
    program = (
        "from torch.utils.data import DataLoader, Dataset\nfrom perflab.loading.guards import guards\n"
        "class Cell(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): return i\n"
        "found = guards(DataLoader(Cell(), num_workers=1, multiprocessing_context='forkserver'))\n"
        "print([(a.about, 'Cell is defined in the notebook' in a.what) for a in found.alarms])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[('pickling', True)]"] and done.stderr == ""


class Elsewhere(Plain):
    def __getitem__(self, i):
        return {"x": torch.zeros(2, device="meta")}


def test_samples_on_a_device_are_named():
    found = guards(loader(Elsewhere()))
    assert alarms(found) == {"device"} and found["same samples"].state == "not checked"


@pytest.mark.slow
def test_a_default_device_is_named():
    dataset = Plain()
    torch.set_default_device("meta")
    try:
        found = guards(loader(dataset))
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert alarms(found) == {"device"} and "set_default_device" in found["device"].what


# -- batches


def test_a_last_batch_of_one_is_named():
    assert alarms(guards(loader(Plain(65), batch_size=32))) == {"last batch"}
    assert guards(loader(Plain(65), batch_size=32, drop_last=True)).clear


@pytest.mark.slow
def test_a_batch_larger_than_the_dataset_is_named():
    assert alarms(guards(loader(Plain(10), batch_size=32, drop_last=True))) == {"last batch"}
    assert guards(loader(Plain(10), batch_size=32)).clear


@pytest.mark.slow
def test_samples_dropped_by_every_worker_are_counted():
    share = lambda n, w: range(w.id, n, w.num_workers)  # noqa: E731
    found = guards(loader(Numbers(99, share), workers=4, batch_size=16, drop_last=True))
    assert alarms(found) == {"last batch"} and "35 of 99" in found["last batch"].what


# -- what goes wrong on the way


class Broken(Plain):
    def __getitem__(self, i):
        if i == 33:
            raise ValueError("no such record")
        return i


def test_an_index_that_raises_is_named_and_the_rest_goes_on():
    found = guards(loader(Broken()))
    assert alarms(found) == {"same samples"}
    assert "index 33 raises ValueError: no such record" in found["same samples"].what
    assert found["random streams"].state == "fine"


@pytest.mark.slow
def test_a_collate_function_that_fails_is_named():
    def collate(samples):
        raise RuntimeError("ragged")

    found = guards(loader(Plain(), collate_fn=collate))
    assert "RuntimeError: ragged" in found["same samples"].what and not found.clear


LOCK = threading.Lock()


class Locked(Plain):
    def __getitem__(self, i):
        with LOCK:
            return i


@pytest.mark.timed
def test_a_lock_held_across_the_fork_is_a_hang_that_ends():
    before = set(psutil.Process().children(recursive=True))
    began = time.perf_counter()
    with LOCK:
        found = guards(loader(Locked()), timeout_s=1)
    assert time.perf_counter() - began < 12
    assert alarms(found) == {"same samples"} and "in __getitem__" in found["same samples"].what
    assert not set(psutil.Process().children(recursive=True)) - before


class Hangs(Plain):
    def __getitem__(self, i):
        if get_worker_info():
            time.sleep(1000)
        return i


class Dies(Plain):
    def __getitem__(self, i):
        if get_worker_info():
            os.kill(os.getpid(), 9)
        return i


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [(Hangs, "No sample came for 2 s"), (Dies, "died")])
def test_workers_that_hang_or_die_end_and_are_told(kind, words):
    before = set(psutil.Process().children(recursive=True))
    began = time.perf_counter()
    found = guards(loader(kind()), timeout_s=2)
    assert time.perf_counter() - began < 15
    assert "same samples" in alarms(found) and words in found["same samples"].what
    assert not set(psutil.Process().children(recursive=True)) - before


class NoLength(Dataset):
    def __getitem__(self, i):
        if i >= 7:
            raise IndexError(i)
        return i


@pytest.mark.slow
def test_datasets_without_length_of_one_sample_and_empty():
    found = guards(NoLength())
    assert found.clear and found["same samples"].state == "fine" and "7 of 7" in found["same samples"].what
    assert guards(TensorDataset(torch.zeros(1, 3))).clear
    assert states(guards(TensorDataset(torch.zeros(0, 3))))["same samples"] == "not checked"
    with pytest.raises(PerflabError, match="not int"):
        guards(3)


@pytest.mark.slow
def test_more_workers_than_cores_warn_nobody(recwarn):
    many = loader(Plain(), workers=6)
    recwarn.clear()
    assert guards(many).clear and not recwarn.list


def test_the_learners_random_streams_and_workers_stay(capfd):
    mine = loader(Flip(), persistent_workers=True)
    next(iter(mine))
    pids = [w.pid for w in mine._iterator._workers]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = guards(mine)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
    assert [w.pid for w in mine._iterator._workers] == pids and all(w.is_alive() for w in mine._iterator._workers)
    assert len(list(mine)) == 13 and capfd.readouterr() == ("", "")
    mine._iterator._shutdown_workers()
    assert found.clear and multiprocessing.active_children() == []


def test_a_table_a_text_and_the_names():
    found = guards(loader(Plain()))
    assert [c.guard for c in found.checks] == list(RULES) and found.clear
    shown = found._repr_mimebundle_()
    assert shown["text/plain"] == "\n".join(f"{g}: fine" for g in RULES) and "<table>" in shown["text/html"]
    assert str(found) == "No alarm." and found.require() is None
    with pytest.raises(KeyError, match="no guard 'speed'"):
        found["speed"]


# -- the same faults in other clothes


class ShuffledApart(IterableDataset):
    """Each worker shuffles in its own way, and then takes every n-th."""

    def __iter__(self):
        everything = list(range(500))
        random.shuffle(everything)
        worker = get_worker_info()
        for i in everything[worker.id :: worker.num_workers] if worker else everything:
            yield i + np.random.random()


class LocalGenerator(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        rng = np.random.default_rng(0)
        for i in range(worker.id, 300, worker.num_workers) if worker else range(300):
            yield i + rng.normal()


class EpochOfStream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        everything = list(range(300))
        random.Random(self.epoch).shuffle(everything)
        worker = get_worker_info()
        yield from everything[worker.id :: worker.num_workers] if worker else everything


class Handle:
    """As h5py's: a library's object, with a descriptor inside."""

    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115

    def fileno(self):
        return self.file.fileno()

    def read(self, i):
        self.file.seek(100 * i)
        return self.file.read(100)


class Handles(Plain):
    def __init__(self, path):
        super().__init__()
        path.write_bytes(os.urandom(100 * self.n))
        self.parts = {"train": Handle(path)}

    def __getitem__(self, i):
        return self.parts["train"].read(i)


class Tar(Plain):
    def __init__(self, path):
        super().__init__(60)
        with tarfile.open(path, "w") as out:
            for i in range(self.n):
                member = tarfile.TarInfo(str(i))
                member.size = 20_000
                out.addfile(member, io.BytesIO(os.urandom(20_000)))
        self.tar = tarfile.open(path)  # noqa: SIM115

    def __getitem__(self, i):
        return self.tar.extractfile(str(i)).read()


class ByPartial(Plain):
    def __init__(self):
        super().__init__()
        self.noise = functools.partial(torch.rand, (2,), generator=torch.Generator().manual_seed(3))

    def __getitem__(self, i):
        return i + self.noise()


class Mixup:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, samples):
        return torch.stack(samples) * self.rng.random()


class Lines(Plain):
    def __init__(self):
        super().__init__(200_000)
        self.columns = {"text": [f"line {i} of the text" for i in range(self.n)], "label": list(range(self.n))}

    def __getitem__(self, i):
        return self.columns["label"][i]


LOG = {}


class Logs(Plain):
    def __getitem__(self, i):
        LOG[time.perf_counter_ns()] = i
        return i


class HoardsAll(Plain):
    """A cache whose end lies far beyond memory."""

    def __init__(self):
        super().__init__(10**9)
        self.kept = {}

    def __getitem__(self, i):
        return self.kept.setdefault(i, np.full(3000, float(i)))[0]


class Crowd(Plain):
    def __getitem__(self, i):
        sort = functools.partial(np.sort, np.arange(300_000)[::-1])
        crowd = [threading.Thread(target=sort) for _ in range(4)]
        [t.start() for t in crowd]
        [t.join() for t in crowd]
        return i


class FailsInWorkers(Plain):
    def __getitem__(self, i):
        if get_worker_info() and i == 50:
            raise OSError("stale handle")
        return i


class Crashes(Plain):
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(Plain):
    def __getitem__(self, i):
        sys.exit(3)


OTHERS = {
    "shuffled apart": ("none lost or doubled", lambda _: (ShuffledApart(), {})),
    "a generator of the iteration": ("random streams", lambda _: (LocalGenerator(), {})),
    "the epoch of a stream": ("set_epoch", lambda _: (EpochOfStream(), {"persistent_workers": True})),
    "a library's handle": ("file handles", lambda t: (Handles(t / "h"), {})),
    "tar": ("file handles", lambda t: (Tar(t / "t"), {})),
    "functools.partial": ("random streams", lambda _: (ByPartial(), {})),
    "collate": ("random streams", lambda _: (Plain(), {"collate_fn": Mixup()})),
    "columns": ("memory growth", lambda _: (Lines(), {})),
    "a dict of the module": ("memory growth", lambda _: (Logs(), {})),
    "a cache of all": ("memory growth", lambda _: (HoardsAll(), {"batch_size": 100, "shuffle": True})),
    "threads that come and go": ("threads", lambda _: (Crowd(), {})),
    "fails in workers": ("same samples", lambda _: (FailsInWorkers(), {})),
    "crashes": ("same samples", lambda _: (Crashes(), {})),
    "exits": ("same samples", lambda _: (Exits(), {})),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_the_same_fault_in_other_clothes_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("perflab.bench.machine.cores", lambda: 2)
    guard, made = OTHERS[kind]
    dataset, more = made(tmp_path)
    found = guards(loader(dataset, **more))
    assert guard in alarms(found) and alarms(found) <= {guard, *({"same samples"} if guard == "file handles" else ())}


class WithHistory(Plain):
    def __getitem__(self, i):
        return torch.ones(3, requires_grad=True) * i


class Lazily(Plain):
    def __getitem__(self, i):
        return (x for x in [i])


@pytest.mark.parametrize("kind", [WithHistory, Lazily])
def test_a_batch_that_no_worker_can_send_is_named_and_not_waited_for(kind):
    found = guards(loader(kind(), collate_fn=list))
    assert "pickling" in alarms(found) and "cannot send a batch" in found["pickling"].what


def test_a_watchdog_of_the_learner_is_no_alarm():
    faulthandler.dump_traceback_later(600)
    try:
        assert guards(loader(Plain()), timeout_s=5).clear
    finally:
        faulthandler.cancel_dump_traceback_later()


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_stream_without_a_sample_is_named():
    assert "last batch" in alarms(guards(loader(Nothing())))
