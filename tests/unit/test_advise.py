"""How many workers: planted knees, checks before advice, what does not fit."""

import itertools
import multiprocessing
import os
import random
import time
import warnings
import zipfile
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from perflab import PerflabError, advise, question, vary
from perflab.bench import machine
from perflab.bench.estimate import Knee
from perflab.loading.advise import Advice
from perflab.loading.decode import StagedDraft
from perflab.loading.images import StagedPhotos

pytestmark = pytest.mark.timed


class Gated(Dataset):
    """An item takes 6 ms, and at most four are handled at a time, as by a store with four connections."""

    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 64

    def __getitem__(self, i):
        with self.gate:
            time.sleep(0.006)
        return torch.tensor(i)


def epoch(loader):
    for _ in loader:
        pass


def kept(dataset, n, size=2):
    how = {"persistent_workers": True, "multiprocessing_context": "fork"} if n else {}
    return DataLoader(dataset, size, num_workers=n, **how)


def swept(dataset, workers, **how):
    how |= {"prepare": lambda n: kept(dataset, n), "per": "sample", "work": len(dataset)}
    return vary("num_workers", workers, epoch, **how)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("neighbours", [0, pytest.param(2, marks=pytest.mark.weekly)], ids=["quiet", "loaded"])
def test_a_gate_of_four_is_found_and_no_other_knee(neighbours, busy_neighbours, note):
    """The whole bar, 20 sweeps each, with PERFLAB_TRIALS=20."""
    dataset = Gated(multiprocessing.get_context("fork").Semaphore(4))
    trials = int(os.environ.get("PERFLAB_TRIALS", "2"))
    with busy_neighbours(neighbours):
        knees = [swept(dataset, [1, 2, 4, 8], study="t.gate").knee() for _ in range(trials)]
    wrong = [k for k in knees if k.values and "4" not in k.values]
    told = sum(k.values == ("4",) for k in knees)
    note(f"a gate of four, {neighbours} neighbours: {told} of {len(knees)} knees found, {len(wrong)} wrong")
    assert not wrong, knees


class Computing(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return torch.tensor(i)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("neighbours", [0, pytest.param(4, marks=pytest.mark.weekly)], ids=["quiet", "loaded"])
def test_work_that_fills_cores_has_its_knee_at_the_cores_or_none_under_load(neighbours, busy_neighbours):
    n = machine.cores()
    with busy_neighbours(neighbours):
        sweep = swept(Computing(), sorted({1, n, 2 * n}), study="t.cores")
    knee = sweep.knee()
    assert str(n) in knee.values or sweep.crowded
    if sweep.crowded:
        assert knee.within(n, n).state == "CANNOT TELL"


def test_advice_is_the_fewest_that_suffice():
    advice = advise(DataLoader(TensorDataset(torch.arange(64)), 4), [0, 1], study="t.own")
    assert not advice.alarms and advice.result.measured == ["0", "1"]
    assert str(advice).startswith(("Take num_workers=", "No number of workers is recommended: other processes"))


@pytest.mark.parametrize(
    ("knee", "said"),
    [
        (Knee(("2", "4")), "Take num_workers=4: 2 or 4 reach 90 %"),
        (Knee(("2",)), "the fewest that reach 90 % of the best rate measured."),
        (Knee(("8",)), "It is also the most that was tried: try more."),
        (Knee((), "other processes took 1.0 of 2 cores"), "No number of workers is recommended: other processes"),
    ],
)
def test_advice_says_what_the_rounds_can_tell(knee, said):
    measured = SimpleNamespace(measured=("0", "2", "4", "8"), knee=lambda: knee)
    assert said in str(Advice(None, measured))


class Doubled(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40))


def test_nothing_is_measured_behind_an_alarm():
    advice = advise(DataLoader(Doubled(), 4, num_workers=2, multiprocessing_context="fork"), [0, 2], study="t.own")
    assert advice.result is None and "none lost or doubled" in {alarm.about for alarm in advice.alarms}
    assert str(advice).startswith("No number of workers is recommended.")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_does_not_fit_is_a_row_and_the_sweep_goes_on(monkeypatch):
    large = TensorDataset(torch.zeros(32, 2**18))  # a batch of 4 holds 4 MiB
    monkeypatch.setattr(machine, "shm_bytes", lambda: 12 * 2**20)
    advice = advise(DataLoader(large, 4), [0, 1, 4], study="t.own")
    assert advice.result.measured == ["0", "1"]
    assert "/dev/shm" in advice.result.reasons["4"]


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "loader", [DataLoader(Nothing(), 4), DataLoader([], 4), DataLoader(torch.zeros(2), 4, drop_last=True)]
)
def test_an_epoch_without_a_batch_is_an_alarm(loader):
    assert [alarm.about for alarm in advise(loader, [0]).alarms] == ["last batch"]


class LazyZip(Dataset):
    """Opens its archive when it is first read, once in each process: right, unless somebody reads before the fork."""

    def __init__(self, path):
        self.path, self.archive, self.noise = path, None, torch.zeros(1)

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return torch.tensor(list(self.archive.read(f"{i}.bin")))


class Counting(torch.utils.data.Sampler):
    """A sampler that counts its epochs."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(self.n).tolist())


def test_what_is_opened_lazily_and_what_is_drawn_stay_as_they_were(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for i in range(32):
            archive.writestr(f"{i}.bin", bytes([i]) * 64)
    sampler = Counting(32)
    generator = torch.Generator()
    loader = DataLoader(LazyZip(tmp_path / "x.zip"), 4, sampler=sampler, generator=generator)
    streams, drawn = (torch.get_rng_state(), random.getstate()), generator.get_state()
    advice = advise(loader, [0, 2], study="t.own")
    assert not advice.alarms and advice.result.measured == ["0", "2"]
    assert loader.dataset.archive is None and sampler.epoch == 0
    assert torch.equal(torch.get_rng_state(), streams[0]) and random.getstate() == streams[1]
    assert torch.equal(generator.get_state(), drawn)


@pytest.mark.parametrize("workers", [[], 2, ["a"], [-1], [1.5], "12", [True]])
def test_numbers_of_workers_that_are_none_are_one_sentence(workers):
    with pytest.raises(PerflabError, match=r"no list of whole numbers of 0 or more: write \[0, 1, 2, 4\]"):
        advise(DataLoader(TensorDataset(torch.arange(8)), 4), workers)


@pytest.mark.parametrize("thing", [3, TensorDataset(torch.arange(8)), None])
def test_what_is_no_loader_is_one_sentence(thing):
    with pytest.raises(PerflabError, match="advise takes a DataLoader, not"):
        advise(thing)


def test_a_batch_sampler_without_a_length_is_fine():
    def lists():
        yield from ([k, k + 1] for k in range(0, 16, 2))

    class NoLength:
        def __iter__(self):
            return lists()

    loader = DataLoader(TensorDataset(torch.arange(16)), batch_sampler=NoLength())
    assert advise(loader, [0, 1], study="t.own").result.work["0"] == 8


def test_an_endless_stream_is_one_sentence(monkeypatch):
    class Endless(IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            return (torch.tensor(k) for k in itertools.count(first, step))

    monkeypatch.setattr("perflab.loading.advise.PATIENCE_S", 0.2)
    with pytest.raises(PerflabError, match=r"no answer within 0\.2 s.: give a shorter epoch"):
        advise(DataLoader(Endless(), 4, num_workers=2, multiprocessing_context="fork"), [0, 2])


def test_no_worker_is_left_and_loader_and_warnings_stay_as_they_were():
    before, filters = set(psutil.Process().children()), list(warnings.filters)
    loader = kept(TensorDataset(torch.arange(16)), 1)
    advise(loader, [0, 1], study="t.own")
    assert set(psutil.Process().children()) <= before and loader._iterator is None
    assert warnings.filters == filters


def test_cores_for_a_demand():
    q = question("01.1")
    assert q.check(eval(q.problem.solution)).state == q.check(39).state == "Correct"
    for wrong, word in {3000 / 13: "divides", 39_000: "milliseconds", 77: "one core", 1: "seconds of work"}.items():
        outcome = q.check(wrong)
        assert outcome.state == "Not right" and word in outcome.sentence, wrong


def given(make, pick=slice(None)):
    """An answer: a loader over what `make` makes of some of the paths."""
    return lambda paths: DataLoader(make(paths=paths[pick]), batch_size=4)


class Small(StagedDraft):
    def decode(self, data):
        return super().decode(data).resize((60, 34))


class Floats(StagedPhotos):
    def __getitem__(self, i):
        pixels, label = super().__getitem__(i)
        return pixels.float(), label


@pytest.mark.slow
def test_the_same_pixels_at_twice_the_rate():
    scope: dict = {}
    exec(question("01.2").problem.solution, scope)
    assert question("01.2").check(scope["feed"]).state in ("Correct", "CANNOT TELL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (given(StagedPhotos), "as fast"),
        (given(StagedDraft, pick=slice(None, None, -1)), "another order"),
        (given(Small), "leaves out"),
        (given(StagedDraft, pick=slice(-1)), "came out"),
        (given(Floats), "float32"),
        (3, "a function"),
        (lambda paths: 3, "raised TypeError"),
    ],
)
def test_another_loader_hears_why_it_is_not_right(answer, word):
    outcome = question("01.2").check(answer)
    assert outcome.state in ("Not right", "CANNOT TELL") and word in outcome.sentence, outcome
    assert multiprocessing.active_children() == []
