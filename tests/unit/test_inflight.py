"""What is in flight, what it takes, what does not fit, and why workers die."""

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from operator import itemgetter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from perflab import PerflabError, question
from perflab.bench import machine
from perflab.course.form import read
from perflab.loading import inflight
from perflab.loading.errors import explain
from perflab.loading.exercises_02 import Readings
from perflab.loading.props import Sentences
from perflab.loading.timelines import load_times, queue, waiting
from perflab.paths import NOTEBOOKS

FORK = {"multiprocessing_context": "fork"}
SHM = os.path.isdir("/dev/shm")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class Stored(Dataset):
    def __init__(self, item, items=10_000):
        self.item, self.items = item, items

    def __len__(self):
        return self.items

    def __getitem__(self, i):
        return self.item


class Counted(Stored):
    """Counts its own items, in memory that all workers share."""

    def __init__(self):
        super().__init__(0, 999)
        self.made = multiprocessing.Value("l", 0)

    def __getitem__(self, i):
        with self.made.get_lock():
            self.made.value += 1
        return i


PACES = {"bursty": (0.001, 0.001, 0.001, 0.001, 0.011), "slow": (0.006,) * 5}


class Paced(Stored):
    """Item i sleeps, as the dataset of the notebook does."""

    def __getitem__(self, i):
        time.sleep(self.item[i % len(self.item)])
        return i


class Endless:
    """A map-style dataset without a length."""

    def __getitem__(self, i):
        return torch.full((2048,), i, dtype=torch.int32)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(8, dtype=torch.int64) for _ in range(99))


class Box:
    """A batch of one's own."""

    def __init__(self, x):
        self.x = x


# -- batches in flight


@pytest.mark.parametrize(("workers", "ahead"), [(2, 2), (2, 4), (4, 8)])
def test_batches_in_flight_are_workers_times_prefetch_factor(workers, ahead):
    loader = DataLoader(data := Counted(), 3, num_workers=workers, prefetch_factor=ahead, **FORK)
    counts = {"asked": workers * ahead, "made": workers * ahead, "after_one": workers * ahead + 1}
    assert inflight.in_flight(loader) == counts and data.made.value == 3 * (workers * ahead + 1)


TWO = {"num_workers": 2, **FORK}


@pytest.mark.parametrize(
    ("loader", "counts"),
    [
        (DataLoader(range(99), 4), (0, 0, 1)),
        (DataLoader(range(9), 4, **TWO), (3, 3, 3)),
        (DataLoader(range(9), 4, drop_last=True, **TWO), (2, 2, 2)),
        (DataLoader(range(99), None, **TWO), (4, 4, 5)),
        (DataLoader(range(99), 4, shuffle=True, num_workers=1, prefetch_factor=3, persistent_workers=True), (3, 3, 4)),
        (DataLoader(range(99), batch_sampler=[[0, 1], [2], [5, 6, 7]], **TWO), (3, 3, 3)),
        (DataLoader([], 4, **TWO), (0, 0, 0)),
        (DataLoader(range(1), 4, **TWO), (1, 1, 1)),
        (DataLoader(Endless(), 4, sampler=range(99), **TWO), (4, 4, 5)),
    ],
)
def test_in_flight_of_any_map_style_loader(loader, counts):
    assert tuple(inflight.in_flight(loader).values()) == counts


def test_in_flight_leaves_the_loader_and_no_process_behind():
    loader = DataLoader(Counted(), 4, num_workers=2, persistent_workers=True, **FORK)
    batches = iter(loader)
    mine = {child.pid for child in multiprocessing.active_children()}
    inflight.in_flight(loader)
    assert {child.pid for child in multiprocessing.active_children()} == mine and len(mine) == 2
    assert len(list(batches)) == 250
    batches._shutdown_workers()


@pytest.mark.parametrize(
    ("call", "wrong", "said"),
    [
        (inflight.in_flight, DataLoader(Stream(), 4), "count its samples"),
        (inflight.seen_bytes, DataLoader(Stream(), 4), "count its samples"),
        *((call, 3, "takes a DataLoader") for call in (inflight.in_flight, inflight.flight_bytes, inflight.fitting)),
    ],
)
def test_what_cannot_be_counted_is_refused_in_a_sentence(call, wrong, said):
    with pytest.raises(PerflabError, match=said):
        call(wrong)


class Bad(Stored):
    def __getitem__(self, i):
        raise OSError("disk gone")


def fails(samples):
    raise KeyError("label")


BROKEN = [(Bad(0), default_collate, "OSError: disk gone"), (Stored(0), fails, "KeyError: 'label'")]


@pytest.mark.parametrize(("data", "collate", "said"), BROKEN)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_is_one_sentence_with_its_error(data, collate, said, workers):
    loader = DataLoader(data, 4, num_workers=workers, collate_fn=collate, **(FORK if workers else {}))
    with pytest.raises(PerflabError, match=f"cannot make its batches .{said}.*mend the dataset first"):
        inflight.in_flight(loader, patience_s=0.3)
    with pytest.raises(PerflabError, match=f"cannot be made into a batch .{said}.*mend the dataset"):
        inflight.batch_bytes(loader)
    assert multiprocessing.active_children() == []


# -- bytes


def storages(batch) -> int:
    """Bytes of a collated batch, in pages, as torch's storages say."""
    page = os.sysconf("SC_PAGESIZE")
    if isinstance(batch, torch.Tensor):
        return -(-batch.untyped_storage().nbytes() // page) * page
    members = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return sum(storages(member) for member in members)


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(3, 64, 64, dtype=torch.uint8),
        {"image": torch.zeros(3, 64, 64), "name": "cat.jpg", "label": 3},
        (np.zeros(5000), [1.5, 2.5], ({"mask": torch.zeros(100, 100, dtype=torch.bool)}, b"raw")),
        [0.5] * 50,
        7,
        "text",
    ],
)
def test_batch_bytes_are_those_of_a_real_batch(item):
    loader = DataLoader(Stored(item), 32)
    assert inflight.batch_bytes(loader) == storages(default_collate([item] * 32))


@pytest.mark.parametrize(
    ("loader", "nbytes"),
    [
        (DataLoader(Stream(), 512), 512 * 64),
        (DataLoader(Stored(torch.zeros(2048)), None), 8192),
        (DataLoader(Stored(torch.zeros(2048), items=3), 64), 3 * 8192),
        (DataLoader(Stored(torch.zeros(2048)), batch_sampler=[[1, 2], [3, 4]]), 2 * 8192),
        (DataLoader(Endless(), 4, sampler=range(99)), 4 * 8192),
        (DataLoader(Stored(Box(torch.zeros(2048))), 4, collate_fn=itemgetter(0)), 4 * 8192),
        (DataLoader([], 4), 0),
        (DataLoader([], None), 0),
    ],
)
def test_batch_bytes_of_other_loaders(loader, nbytes):
    assert inflight.batch_bytes(loader) == nbytes


class Once(IterableDataset):
    """Can be read once."""

    def __init__(self):
        self.numbers = iter(range(9))

    def __iter__(self):
        return self.numbers


class LazyDraws(Stored):
    """Opens its file when it is first read, and draws from every stream there is."""

    file = None

    def __getitem__(self, i):
        self.file = self.file or open(self.item, "rb")  # noqa: SIM115
        return torch.rand(4), np.random.random(), random.random()


def test_looking_at_a_sample_changes_nothing_here():
    """A file opened here would be shared by all workers that are forked later."""
    once, lazy = Once(), LazyDraws(os.devnull)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert inflight.batch_bytes(DataLoader(once, 4)) == os.sysconf("SC_PAGESIZE")
    inflight.batch_bytes(DataLoader(lazy, 4, shuffle=True))
    assert list(once.numbers) == list(range(9)) and lazy.file is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.skipif(not SHM, reason="no /dev/shm here")
@pytest.mark.parametrize(("dtype", "ahead"), [(torch.uint8, 2), (torch.uint8, 8), (torch.float32, 2)])
def test_bytes_in_flight_are_seen_in_shared_memory_within_a_fifth(dtype, ahead):
    item = torch.zeros(3, 128, 128, dtype=dtype)
    loader = DataLoader(Stored(item), 64, num_workers=2, prefetch_factor=ahead, **FORK)
    told = 2 * ahead * 64 * item.numel() * item.element_size()
    assert inflight.flight_bytes(loader) == told
    seen = [inflight.seen_bytes(loader) for _ in range(3)]  # others on this machine use /dev/shm too
    assert statistics.median(seen) == pytest.approx(told, rel=0.2)


def test_what_fits_is_given_back_and_starts_nothing():
    loader = DataLoader(Stored(torch.zeros(9)), 4, num_workers=2, **FORK)
    none = DataLoader(Stored(torch.empty(2**40, device="meta")), 4)
    assert inflight.fitting(loader) is loader and inflight.fitting(none) is none
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("shm", "ram", "word"), [(2**20, 2**40, "/dev/shm has 1.00 MiB free"), (2**40, 2**20, "RAM")])
def test_what_does_not_fit_is_one_sentence_with_its_figures(shm, ram, word, monkeypatch):
    monkeypatch.setattr(machine, "shm_bytes", lambda: shm)
    monkeypatch.setattr(machine, "ram_bytes", lambda: ram)
    loader = DataLoader(Stored(torch.zeros(2**16)), 4, num_workers=2, prefetch_factor=3, **FORK)
    with pytest.raises(PerflabError, match=r"2 x 3 \+ 1 batches of 1\.00 MiB take 7\.00 MiB") as said:
        inflight.fitting(loader)
    assert word in str(said.value) or not SHM
    assert len(str(said.value)) < 200 and multiprocessing.active_children() == []


SMALL_SHM = """
import sys, warnings, torch
from torch.utils.data import DataLoader, Dataset
from perflab import vary
from perflab.loading.errors import explain
from perflab.loading.inflight import fitting
warnings.simplefilter("ignore")

class Big(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.ones(3, 512, 512)

def loader(ahead): return DataLoader(Big(), 4, num_workers=2, prefetch_factor=ahead, multiprocessing_context="fork")

if sys.argv[1] == "guarded":
    swept = vary("ahead", [1, 4], lambda l: [None for _ in l], prepare=lambda n: fitting(loader(n)),
                 study="t.shm", budget_s=0.1)
    print(swept)
    assert swept["time_s"].of(1).n and not swept["time_s"].of(4).n
else:
    try:
        batches = [batch for batch in loader(4)]
    except Exception as e:
        print("heard:", type(e).__name__, str(e)[:90], "explained:", explain(e))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["guarded", "bare"])
def test_a_docker_sized_dev_shm_is_foretold_and_its_deaths_are_explained(how, tmp_path):
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'
    inside = ["unshare", "-m", "sh", "-c", mount]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("a /dev/shm of its own needs unshare -m and the right to mount")
    script = tmp_path / "small.py"
    script.write_text(SMALL_SHM)
    done = subprocess.run([*inside, sys.executable, str(script), how], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    if how == "guarded":
        assert "/dev/shm has 64.0 MiB free, and 2 x 4 + 1 batches of 12.0 MiB take 108 MiB" in done.stdout
    else:
        assert "heard:" in done.stdout and "/dev/shm is full" in done.stdout.split("explained:")[1]


# -- memory


def hold(n, ready, done):
    block = bytearray(os.urandom(1024) * n)
    ready.set()
    done.wait(20)
    return block


def test_held_bytes_are_the_private_memory_of_living_children():
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=hold, args=(50 * 1024, ready, done))
    child.start()
    try:
        assert ready.wait(20)
        held = inflight.held_bytes()
        assert held == pytest.approx(psutil.Process(child.pid).memory_full_info().uss, rel=0.05)
        assert held > 50 * 2**20 and inflight.held_bytes("spawn") == 0
    finally:
        done.set()
        child.join()
    assert inflight.held_bytes() == 0


# -- deaths


class Dies(Stored):
    def __getitem__(self, i):
        self.item()


def error_of(call) -> BaseException:
    with pytest.raises(BaseException) as said:
        call()
    return said.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGBUS), ["/dev/shm", "--shm-size"]),
        (lambda: os._exit(3), ["notebook cell", "num_workers=0"]),
        (lambda: time.sleep(1.5), ["timeout", "forkserver"]),
    ],
    ids=["bus error", "exit", "timeout"],
)
def test_the_real_death_of_a_worker_is_explained(death, words):
    how = {"timeout": 0.5} if "sleep" in death.__code__.co_names else {}
    loader = DataLoader(Dies(death), 1, num_workers=1, **how, **FORK)
    sentence = explain(error_of(lambda: list(loader)))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("unable to allocate shared memory(shm) for file: No space left on device (28)", "/dev/shm is full"),
        ("unable to write to file </torch_7_1_0>: No space left on device (28)", "/dev/shm first"),
        ("Too many open files. Communication with the workers is no longer possible.", "ulimit -n"),
        ("unable to open shared memory object </torch_7> in read-write mode: Too many open files (24)", "ulimit -n"),
        ("received 0 items of ancdata", "ulimit -n"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "/dev/shm is full"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "memory ran out"),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "crashed"),
        ("DataLoader worker (pid 7) is killed by signal: Aborted. ", "num_workers=0"),
        ("OSError: [Errno 12] Cannot allocate memory", "Memory ran out"),
        ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with", "return CPU tensors"),
        ("AttributeError: Can't get attribute 'Cell' on <module '__main__' (built-in)>", "notebook cell"),
        (str(error_of(lambda: pickle.dumps(lambda: 0))), "lambda"),
        (str(error_of(lambda: pickle.dumps(open(os.devnull)))), "open handle"),  # noqa: SIM115
    ],
)
def test_a_known_message_is_explained_with_a_way_out(message, word):
    sentence = explain(message)
    assert word in sentence and sentence.count(". ") == 0 and sentence.endswith(".")


def test_an_unknown_message_is_not_explained():
    assert explain(ValueError("shapes differ")) == ""


# -- the model


def test_the_mean_stays_whatever_the_burst():
    for burst in (1, 2.5, 5):
        assert statistics.mean(load_times(0.03, burst, 100)) == pytest.approx(0.03)


def test_without_variance_more_ahead_gains_nothing_and_with_it_the_wait_goes():
    def waits(burst, prefetch, in_order=True):
        return waiting(queue(load_times(0.003, burst, 400), 0.002, 2, prefetch, in_order))

    assert waits(1, 1) == waits(1, 8) == 0
    assert waits(4, 1) > 0.3 > 0.05 > waits(4, 8)
    assert waits(4, 1, in_order=False) < waits(4, 1)


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize("kind", [("bursty", 1, True), ("bursty", 8, True), ("slow", 2, True), ("bursty", 1, False)])
def test_the_model_takes_as_long_as_a_real_loader(kind):
    pace, ahead, in_order = kind
    loads, step_s = [6 * PACES[pace][i % 5] for i in range(30)], 0.012
    how = {"num_workers": 2, "prefetch_factor": ahead, "in_order": in_order, **FORK}
    loader = DataLoader(Paced(tuple(loads), 30), None, persistent_workers=True, **how)

    def epoch():
        began = time.perf_counter()
        for _ in loader:
            time.sleep(step_s)
        return time.perf_counter() - began

    seen = min(epoch() for _ in range(3))
    model = max(s.end for s in queue(loads, step_s, 2, ahead, in_order) if s.lane == "loop")
    assert 0.9 < seen / model < 1.4


# -- data and exercises


def test_a_sentence_is_what_its_tokens_say():
    text = Sentences(16, words=10, length=12)
    names = {number: name for name, number in text.vocabulary.items()}
    tokens, label = text[7]
    assert " ".join(names[t] for t in tokens.tolist() if t) == text.sentence(7) and label == 1
    assert tokens.shape == (12,) and tokens.dtype == torch.int64 and (tokens[10:] == 0).all()
    assert len(Sentences(4, words=40, length=12)[0][0]) == 12
    with pytest.raises(PerflabError, match="1 or more"):
        Sentences(0)


def test_what_does_not_collate_is_quoted_as_torch_says_it():
    said = str(error_of(lambda: default_collate([Image.new("RGB", (4, 4))])))
    text = " ".join(cell.source for cell in read(NOTEBOOKS / "02_loading_knobs.ipynb").cells)
    assert said.split("; found", maxsplit=1)[0] in " ".join(text.replace("`", "").split())


def solution():
    scope: dict = {}
    exec(question("02.1").problem.solution, scope)
    return scope["Mended"]


@pytest.mark.timed
@pytest.mark.slow
def test_the_solution_of_the_three_faults_is_right():
    assert question("02.1").check(solution()).state in ("Correct", "CANNOT TELL")


def changed(change, opened=lambda path: None):
    """The solution, with some of each item replaced by `change(what is opened in __init__, item)`."""

    class Changed(solution()):
        def __init__(self, path):
            super().__init__(path)
            self.own = opened(path)

        def __getitem__(self, i):
            item = super().__getitem__(i)
            return item | change(self.own, item)

    return Changed


def drawn_by_worker(generators, item):
    info = get_worker_info()
    worker = info.id if info else -1
    return {"shift": generators.setdefault(worker, np.random.default_rng(worker + 1)).random()}


def at_its_offset(file, item):
    file.seek((item["number"] - 1000) * 517)  # characters of a line
    number, *values = file.readline().split(",")
    return {"number": int(number), "row": np.array(values, float)}


WHOLE, ONE_BY_ONE, ALIKE = "still reads the whole file", "64 tensors instead of one", "draw the same random numbers"


@pytest.mark.timed
@pytest.mark.parametrize(
    ("dataset", "left"),
    [
        (Readings, {WHOLE, ONE_BY_ONE, ALIKE}),
        (changed(lambda rng, item: {"shift": rng.random()}, lambda path: np.random.default_rng()), {ALIKE}),
        (changed(drawn_by_worker, lambda path: {}), {"Each epoch draws the same"}),
        (changed(lambda _, item: {"row": item["row"].tolist()}), {ONE_BY_ONE}),
        (changed(lambda path, item: {"text": path.read_text()[:0]}, Path), {WHOLE}),
        (changed(at_its_offset, open), {"one shared offset"}),
    ],
)
def test_a_half_mended_dataset_hears_what_is_left_and_nothing_else(dataset, left):
    said = question("02.1").check(dataset)
    others = {WHOLE, ONE_BY_ONE, ALIKE} - left
    assert said.state == "Not right", said
    assert all(words in said.sentence for words in left) and not any(words in said.sentence for words in others), said
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (7, "a class"),
        (lambda path: [], "128 lines"),
        (lambda path: Stored([1], 128), "dictionary"),
        (lambda path: Stored({"number": 1, "row": [0.0] * 64, "shift": 0.0}, 128), "of line 0"),
        (lambda path: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_dataset_hears_why(answer, word):
    said = question("02.1").check(answer)
    assert said.state == "Not right" and word in said.sentence


def test_bytes_in_flight_as_an_exercise():
    q = question("02.2")
    right = 8 * 5 * torch.zeros(64, 3, 224, 224).untyped_storage().nbytes() / 2**30
    assert q.check(eval(q.problem.solution)).state == q.check(right).state == "Correct"
    for wrong, word in {
        right / 4: "4 bytes",
        right / 5: "prefetch_factor",
        right * 1.074: "GB",
        99: "multiply",
    }.items():
        said = q.check(wrong)
        assert said.state == "Not right" and word in said.sentence, wrong


INTERRUPTED = """
import psutil, signal, time, warnings, torch
from torch.utils.data import DataLoader, Dataset
from perflab import observe
from perflab.loading import inflight
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)
FORK = {"num_workers": 2, "multiprocessing_context": "fork"}

class Slow(Dataset):
    def __len__(self): return 500
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((1000, 10), i)

def rows():
    print("go", flush=True)
    list(DataLoader(Slow(), 4, **FORK))
    loader = DataLoader(Slow(), 4, persistent_workers=True, **FORK)
    list(loader)
    inflight.in_flight(DataLoader(Slow(), 100, **FORK))
    return {}

for _ in range(4):
    try:
        observe("t.rows", rows)
        print("not interrupted", flush=True)
    except KeyboardInterrupt:
        print(f"left {len(psutil.Process().children(recursive=True))}", flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_of_what_is_observed_leaves_no_worker(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for wait_s in (0.05, 0.5, 1.6, 3.5):  # while workers start, load, are kept, are counted
            assert child.stdout.readline() == "go\n"
            time.sleep(wait_s)
            os.killpg(child.pid, signal.SIGINT)
            assert child.stdout.readline() == "left 0\n"
        assert child.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
