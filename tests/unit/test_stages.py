"""What a stage costs and where it runs, against sleeps, processor time and pids that were planted."""

import math
import multiprocessing
import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from perflab import PerflabError
from perflab.bench.estimate import interval
from perflab.loading.stages import stage_map, stage_times, trace

pytestmark = pytest.mark.timed


def spin(n=200_000):
    for _ in range(n):
        pass


class Planted(Dataset):
    """An item sleeps 5 ms in `read`, 20 ms in `wait`, and computes in `spin`."""

    def __len__(self):
        return 8

    def read(self, i):
        time.sleep(0.005)
        return i

    def wait(self, i):
        time.sleep(0.02)
        return i

    def spin(self, i):
        spin()
        return torch.tensor([i, os.getpid()])

    def __getitem__(self, i):
        return self.spin(self.wait(self.read(i)))


def timed(call, clock):
    time.sleep(0.025)  # as in an item: after a sleep the same work takes longer, with cold caches
    began = clock()
    call()
    return clock() - began


@pytest.mark.parametrize("neighbours", [0, pytest.param(2, marks=pytest.mark.weekly)], ids=["quiet", "loaded"])
def test_a_planted_stage_costs_what_the_same_call_costs_alone(neighbours, busy_neighbours):
    planted, ratios = Planted(), {"read": [], "wait": [], "spin": []}
    clocks = {"read": time.perf_counter, "wait": time.perf_counter, "spin": time.thread_time}
    with busy_neighbours(neighbours):
        for number in range(16):
            for stage, clock in clocks.items():
                pair = [
                    lambda s=stage, c=clock: stage_times(planted, [s], [0], clock=c)[f"{s}_s"],
                    lambda s=stage, c=clock: timed(lambda: getattr(planted, s)(0), c),
                ]
                first = number % 2  # whoever comes second finds warm caches
                seen = {k: pair[k]() for k in (first, 1 - first)}
                ratios[stage].append(seen[0] / seen[1])
    for stage, seen in ratios.items():
        centre, low, high = (math.exp(x) for x in interval([math.log(r) for r in seen]))
        assert low < 1.05 and high > 0.95 and 0.8 < centre < 1.25, (stage, low, high)


class Nested(Planted):
    def wait(self, i):
        return super().wait(self.read(i))

    def __getitem__(self, i):
        return self.wait(i)


def test_a_stage_inside_another_is_counted_once():
    seen = stage_times(Nested(), ["read", "wait"], [0, 1])
    assert 0.0045 < seen["read_s"] < 0.02 < seen["wait_s"]
    assert seen["item_s"] == pytest.approx(seen["read_s"] + seen["wait_s"], rel=0.05)


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.transform(torch.tensor(i))


def test_an_attribute_that_is_called_can_be_a_stage_and_the_dataset_stays_as_it_is():
    dataset = Transformed(torch.neg)
    assert stage_times(dataset, "transform")["transform_s"] > 0
    assert dataset.transform is torch.neg
    planted = Planted()
    stage_times(planted, ["read"], [0])
    assert vars(planted) == {}


def test_a_stage_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(PerflabError, match=r"no method or callable attribute 'decode'.* it has read, spin, wait"):
        stage_times(Planted(), ["decode"])


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_the_map_names_the_process_that_the_samples_name(workers, method):
    copied = []
    loader = DataLoader(Planted(), 2, num_workers=workers, multiprocessing_context=method)
    events = trace(loader, ["read", "spin"], to=copied.append)
    pids = {int(pid) for batch in copied for pid in batch[:, 1]}
    assert {e.pid for e in events if e.stage in ("read", "spin", "collate")} == pids
    assert (os.getpid() in pids) == (workers == 0)
    assert {e.pid for e in events if e.stage in ("sampler", "copy")} == {os.getpid()}
    rows = stage_map(events)
    assert list(rows) == ["sampler", "read", "spin", "collate", *(["queue"] if workers else []), "copy"]
    calls = {stage: row["calls"] for stage, row in rows.items() if stage != "queue"}
    assert calls == {"sampler": 4, "read": 8, "spin": 8, "collate": 4, "copy": 4}
    assert rows["read"]["processes"] == len(pids) and rows["copy"]["processes"] == 1
    place = "worker processes" if workers else "main process"
    assert rows["collate"]["runs in"] == f"{place}, main thread"
    assert rows["copy"]["runs in"] == "main process, main thread"


class Pairs(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.zeros(2), "name": "a"}] * 3)


@pytest.mark.parametrize("size", [None, 2])
def test_other_loaders_are_traced_too(size):
    events = trace(DataLoader(Pairs(), batch_size=size, num_workers=1, multiprocessing_context="fork"))
    assert {e.stage for e in events} == {"collate", "queue"}
    assert all(e.end_s >= e.start_s for e in events)


class Broken(Planted):
    def read(self, i):
        raise ValueError("a damaged file")


def test_an_item_that_fails_leaves_no_worker():
    with pytest.raises(ValueError, match="a damaged file"):
        trace(DataLoader(Broken(), 2, num_workers=2, multiprocessing_context="fork"), ["read"])
    assert multiprocessing.active_children() == []


def test_the_loader_itself_is_left_alone():
    loader = DataLoader(Planted(), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    trace(loader, ["read"])
    assert loader._iterator is None and type(loader.dataset) is Planted


@pytest.mark.parametrize("dataset", [Pairs(), 3, iter([1])])
def test_stages_of_what_has_no_index_are_refused_in_a_sentence(dataset):
    with pytest.raises(PerflabError, match="map-style"):
        stage_times(dataset, ["read"])
