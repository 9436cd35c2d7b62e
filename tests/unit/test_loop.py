"""The loop of the course: one text in notebook and package, listings that run, boards that find what was planted."""

import ast
import json
import os
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from perflab import PerflabError, paths
from perflab.bench import record
from perflab.bench.result import Result
from perflab.start import loop as module
from perflab.start.board import Board, Scoreboard, board, scoreboard
from perflab.start.listing import loop_code
from perflab.start.loop import Loop, ahead, photo_paths, size

CHANGES = [
    {},
    {"decode": "draft"},
    {"decode": "stored", "uint8": True},
    {"workers": 2, "prefetch": 4, "log_every": 2},
    {"fused": True, "bf16": True, "sdpa": True, "log_every": 0},
]


def _definitions(source):
    """The syntax trees of the classes and functions of a source, by name."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name: ast.dump(node) for node in ast.parse(source).body if isinstance(node, kinds)}


def test_notebook_and_package_hold_one_text():
    cells = json.loads((paths.NOTEBOOKS / "00_start_here.ipynb").read_text())["cells"]
    shown = _definitions("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    with open(module.__file__) as file:
        measured = _definitions(file.read())
    for name in ("normalised", "Photos", "Block", "ViT"):
        assert shown[name] == measured[name], name


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_listing_runs_and_trains(changes):
    loop = replace(Loop(), **changes)
    code = repr(loop_code(loop)).replace("for batch in loader:\n    step", "for batch in few(loader):\n    step")
    code = code.replace("enumerate(loader, 1)", "enumerate(few(loader), 1)")
    names = {"torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader, "os": os, "device": "cpu"}
    names |= {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
    names["few"] = lambda loader: (batch for _, batch in zip(range(2), loader, strict=False))
    exec(code, names)
    assert all(p.grad is not None for p in names["model"].parameters())


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_changed_loop_trains_as_the_loop_does(changes):
    """The same photos give the same loss within rounding; photos decoded smaller come near."""
    torch.manual_seed(0)
    losses = []
    for loop in (Loop(), replace(Loop(), **changes)):
        photos, trainer = replace(loop, workers=0).photos(), replace(loop, log_every=1).trainer()
        chosen = [photos.finish(torch.from_numpy(_pixels(photos, i))) for i in range(size().batch)]
        losses.append(trainer.step((torch.stack(chosen), torch.arange(size().batch) % 10)))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def _pixels(photos, i):
    return np.array(photos.photo(i)).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"decode": "half"}, "decode"), ({"copied_ahead": True}, "pinned"), ({"graphs": True}, "compiled")],
)
def test_changes_that_do_not_fit_are_one_sentence(changes, word):
    with pytest.raises(PerflabError, match=word):
        Loop(**changes)


def test_an_epoch_is_long_enough_for_a_steady_state():
    assert len(photo_paths()) == 100 * size().batch


def planted(step_s, wait_s, alone_s, names=("before", "after"), study="00.board", changes=("", "workers=2")):
    """A board whose loops take these seconds a step, wait so long, and would take so long alone."""
    every = [
        (name, dict(step_s=a, wait_s=b, alone_s=c))
        for name, a, b, c in zip(names, step_s, wait_s, alone_s, strict=True)
    ]
    samples = {
        metric: {name: [(r, [clocks[metric] * (1 + 0.002 * (r % 3))]) for r in range(10)] for name, clocks in every}
        for metric in ("step_s", "wait_s", "alone_s")
    }
    result = Result(study, 1, "loop", list(names), samples=samples, work=dict.fromkeys(names, 16.0))
    result.counts = {name: {"changes": text} for name, text in zip(names, changes, strict=True)}
    result.machine = {"cpu": "a processor", "gpus": [], "cores": 4, "torch": "2.13"}
    return result


def test_a_board_tells_rate_waiting_limit_and_gain():
    one = Board(planted(step_s=(0.040, 0.020), wait_s=(0.030, 0.002), alone_s=(0.010, 0.010)))
    assert one.rate("before").mid == pytest.approx(400, rel=0.01)
    assert one.limit("after").mid == pytest.approx(1600, rel=0.01)
    assert one.waited("before").mid == pytest.approx(0.75) and one.busy("after").mid == pytest.approx(0.9)
    assert one.gain("after").mid == pytest.approx(2)
    assert [row["loop"] for row in one.rows()] == ["before", "after"] and "400" in str(one)


def test_the_gain_in_all_is_a_product_and_a_loop_is_drawn_once():
    first = planted((0.040, 0.020), (0.03, 0.002), (0.01, 0.01))
    second = planted((0.021, 0.014), (0.0, 0.0), (0.01, 0.01), ("as before", "uint8"), "02.board", ("workers=2", "x"))
    rungs = Scoreboard({"here": [Board(first), Board(second)]}).rungs("here")
    assert [rung.name for rung in rungs] == ["before", "after", "uint8"]
    assert [rung.gain for rung in rungs] == ["1×", "2.0×", "3.0×"]


def test_a_change_without_gain_is_light_and_a_broken_chain_is_drawn():
    first = planted((0.040, 0.040), (0.0, 0.0), (0.01, 0.01))
    second = planted((0.03, 0.02), (0.0, 0.0), (0.01, 0.01), ("another", "c"), "02.board", ("stored", "x"))
    rungs = Scoreboard({"here": [Board(first), Board(second)]}).rungs("here")
    assert [(rung.name, rung.gained) for rung in rungs] == [
        ("before", True),
        ("after", False),
        ("another", True),
        ("c", True),
    ]


@pytest.mark.timed
def test_a_board_measures_and_leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    one = board(
        "00", {"as written": Loop(), "two workers": replace(Loop(), workers=2), "pinned": replace(Loop(), pinned=True)}
    )
    assert repr(one) == "Board 00: as written, two workers, pinned"
    assert "on a GPU only" in one.result.reasons["pinned"] or torch.cuda.is_available()
    assert 0 < one.waited("as written").mid < 1 and one.rate("as written").mid < one.limit("as written").mid
    assert set(psutil.Process().children(recursive=True)) <= before
    assert len(scoreboard("00").boards["here"]) == 1


@pytest.mark.timed
def test_a_slow_dataset_is_waited_for(monkeypatch):
    """Thirty milliseconds of sleep a batch beside a step: the share waited is the sleep's."""
    real, sleep_s = module.Photos.__getitem__, 0.03

    def slowly(self, i):
        time.sleep(sleep_s / size().batch)
        return real(self, i)

    monkeypatch.setattr(module.Photos, "__getitem__", slowly)
    slow = board("00", {"slow": Loop()})
    wait, step = (slow.result[metric].of("slow").mid for metric in ("wait_s", "step_s"))
    assert wait >= sleep_s and slow.waited("slow").mid == pytest.approx(wait / step, rel=0.05)


def test_batches_copied_ahead_need_a_device_or_come_in_order():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    batches = ahead(iter([[torch.full((4,), float(i)).pin_memory()] for i in range(5)]))
    assert [next(batches)[0][0].item() for _ in range(4)] == [0, 1, 2, 3]


def test_the_scoreboard_of_an_empty_logbook_is_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("PERFLAB_RECORDED", str(tmp_path))
    assert scoreboard("00").boards == {} and not list(record.entries("results", "00.board"))
