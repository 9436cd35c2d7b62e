"""Copies between host and device: the arithmetic, the model, what is shown, what a machine without CUDA hears."""

import contextlib
import itertools
import math
from unittest.mock import Mock

import nbformat
import pytest
import torch
from torch.utils.data import DataLoader

from perflab import PerflabError, observe, paths, question, vary
from perflab.bench import machine
from perflab.bench.result import Result
from perflab.bench.units import digits, nbytes_of
from perflab.loading import copies, timelines, transfer

SIZES = ["4 KiB", "1 MiB"]


def code_with(name: str) -> str:
    """The cell of the notebook that defines this name."""
    nb = nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4)
    return next(c.source for c in nb.cells if c.cell_type == "code" and name in c.source)


# -- arithmetic


def test_the_formulas_of_the_notebook_take_the_figures_of_one_round():
    """Rounds of different pace: only what is paired is free of it."""
    seconds = {"one stream": 5.0, "copy alone": 3.0, "compute alone": 5.0}
    seconds |= {"pinned": 8.0, "pinned, prefetched": 5.75, "on the device": 5.0}
    samples = {"time_s": {value: [(r, [x * (1 + r)]) for r in range(8)] for value, x in seconds.items()}}
    planted = Result("t.planted", 1, "way", list(seconds), samples)
    scope = {"overlap": planted, "prefetch": planted, "beside": Mock(), "say": print, "digits": digits}
    exec(code_with("def sum_of("), scope)
    exec(code_with("hidden = "), scope)
    for estimate, expected in ((scope["sum_of"]("one stream"), 5 / 8), (scope["hidden"], 0.75)):
        assert estimate.lo == pytest.approx(expected) and estimate.hi == pytest.approx(expected) and estimate.n == 8


def test_a_grid_is_each_way_at_each_size():
    grid = transfer.grid(["pageable", "pinned"], ["4 KiB", "1 MiB", "2 GiB"])
    assert len(grid) == 6
    assert grid["pinned 4 KiB"] == ("pinned", 4096) and grid["pageable 2 GiB"] == ("pageable", 2**31)


@pytest.mark.parametrize("size", ["64", "64 KB", "x MiB", "64KiB", 64, ""])
def test_a_size_that_is_none_is_one_sentence(size):
    with pytest.raises(PerflabError, match="64 KiB"):
        nbytes_of(size)


@pytest.mark.parametrize("nbytes", [1, 8, 4096, 65_537])
def test_random_bytes_are_random_and_of_that_size(nbytes):
    x = transfer.random_bytes(nbytes)
    assert x.shape == (nbytes,) and x.dtype == torch.uint8 and x.nbytes == nbytes
    if nbytes > 60_000:
        counts = torch.bincount(x.long(), minlength=256)
        assert counts.min() > 0 and counts.max() < 1.5 * nbytes / 256


@pytest.mark.parametrize(
    ("generation", "lanes", "gb_per_s"),  # as Wikipedia's table of PCI Express versions has them
    [(1, 1, 0.250), (2, 16, 8.0), (3, 16, 15.754), (4, 16, 31.508), (5, 16, 63.015), (6, 16, 121.0)],
)
def test_a_link_carries_what_its_generation_says(generation, lanes, gb_per_s):
    assert transfer.lane_bytes_per_s(generation, lanes) / 1e9 == pytest.approx(gb_per_s, rel=1e-3)


def test_an_unknown_link_has_no_row(monkeypatch):
    assert math.isnan(transfer.lane_bytes_per_s(9, 16))
    monkeypatch.setattr(machine, "nvml", lambda: contextlib.nullcontext(None))
    assert transfer.bus() == {}
    assert math.isnan(observe("t.bus", transfer.bus, timed=["bytes_per_s"])["bytes_per_s"].of("PCIe").mid)


class Runtime:
    """Stands for the CUDA runtime: which pages are locked now."""

    def __init__(self, fault):
        self.fault, self.held = fault, {}

    def cudaHostRegister(self, pointer, nbytes, flags):
        if not self.fault:
            self.held[pointer] = nbytes
        return self.fault

    def cudaHostUnregister(self, pointer):
        del self.held[pointer]


@pytest.mark.parametrize("fault", [0, 2])
def test_pages_are_unlocked_on_every_path(monkeypatch, fault):
    runtime, x = Runtime(fault), torch.zeros(1000, dtype=torch.float64)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError if fault else KeyError), transfer.locked(x):
        assert runtime.held == {x.data_ptr(): 8000}
        raise KeyError
    assert runtime.held == {}


# -- the model


@pytest.mark.parametrize("way", [timelines.PAGEABLE, timelines.PINNED, timelines.SIDE])
@pytest.mark.parametrize(("copy_s", "compute_s"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_the_time_line_keeps_its_promises(way, copy_s, compute_s):
    spans = timelines.copies(way, copy_s, compute_s, steps=20)
    copying = [s for s in spans if s.lane == "copy"]
    computing = [s for s in spans if s.lane == "compute"]
    for lane in (copying, computing):
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(lane)), "one thing at a time"
    assert all(c.end <= k.start for c, k in zip(copying, computing, strict=True)), "no step before its batch"
    held = sum(s.end - s.start for s in spans if s.lane == "host")
    assert held == pytest.approx(20 * copy_s if way == timelines.PAGEABLE else 0)
    paced = (computing[-1].start - computing[9].start) / 10
    assert paced == pytest.approx(max(copy_s, compute_s) if way == timelines.SIDE else copy_s + compute_s)
    overlapping = sum(max(0.0, min(c.end, k.end) - max(c.start, k.start)) for c in copying for k in computing)
    assert overlapping == pytest.approx(19 * min(copy_s, compute_s) if way == timelines.SIDE else 0)


# -- what is shown


def measured(source="here", asked=()):
    ways = transfer.grid(["pageable", "pinned"], SIZES)
    result = vary("copy", ways, str, study="t.sizes", per="byte", work=lambda value: value[1], budget_s=0.05)
    result.source, result.asked = source, list(asked)
    return result


def shown(monkeypatch, result):
    out = []
    monkeypatch.setattr("IPython.display.display", lambda x, raw=False: out.append(x))
    copies.by_size(result, ["pageable", "pinned"], SIZES, bound=63e9)
    return out


def test_ways_by_size_are_a_table_and_a_figure(monkeypatch):
    table, figure = shown(monkeypatch, measured())
    assert table["text/html"].count("<tr>") == 3 and "GB/s" in table["text/html"]
    assert figure.data[:4] == b"\x89PNG" and "4 KiB, 1 MiB, for pageable, pinned" in figure.alt
    assert table["text/plain"].startswith("Result t.sizes: copy = ")


def test_without_a_measurement_there_is_a_table_of_reasons_and_no_figure(monkeypatch):
    bare = vary("copy", transfer.grid(["pageable", "pinned"], SIZES), print, study="t.no", needs=["cuda"])
    if not bare.reasons:
        pytest.skip("this machine has CUDA")
    (table,) = shown(monkeypatch, bare)
    assert table["text/html"].count("no CUDA device here") >= 4
    assert "no verdict below can tell" in str(copies.Origin(bare))


def test_a_stand_in_is_named_in_words_and_plain_text_is_alike_everywhere():
    here, there = (copies.Origin(r) for r in (measured(), measured("some-gpu", ["no CUDA device here"])))
    assert "measured here" in str(here)
    assert str(there).startswith("Not measured here (no CUDA device here)")
    assert "some-gpu" in there.html() and repr(here) == repr(there)


# -- the notebook's own lines


class Batch:
    """Notes what happens to it, in the order in which it is asked for."""

    def __init__(self, k, log):
        self.k, self.log = k, log

    def to(self, device, non_blocking):
        assert device == "cuda" and non_blocking
        self.log.append(("copy", self.k, self.log.stream))
        return self

    def record_stream(self, stream):
        self.log.append(("record", self.k, stream))


class Log(list):
    stream = "here"

    @contextlib.contextmanager
    def on(self, stream):
        self.stream, before = stream, self.stream
        yield
        self.stream = before

    def wait_stream(self, other):
        self.append(("wait", other))


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: log)
    monkeypatch.setattr(torch.cuda, "stream", log.on)
    return log


def test_the_prefetcher_is_fifteen_lines_and_waits_before_it_queues_the_next_copy(log):
    source = code_with("def prefetched(")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    scope = {"torch": torch}
    exec(source, scope)
    for (x,) in scope["prefetched"]([(Batch(k, log),) for k in range(3)], "side"):
        log.append(("step", x.k))
    once = [[("wait", "side"), ("record", k, log), ("copy", k + 1, "side"), ("step", k)] for k in range(3)]
    expected = [("copy", 0, "side"), *(event for step in once for event in step)]
    assert log == [event for event in expected if event != ("copy", 3, "side")]


def test_what_the_notebook_says_of_a_machine_without_a_gpu_is_what_torch_does():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    nb = nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4)
    prose = " ".join(" ".join(c.source for c in nb.cells if c.cell_type == "markdown").split())
    with pytest.warns(UserWarning, match="pin_memory") as caught:
        assert not next(iter(DataLoader(torch.zeros(4, 2), 2, pin_memory=True))).is_pinned()
    assert str(caught[0].message).rstrip(".") in prose
    with pytest.raises(RuntimeError):
        torch.zeros(2).pin_memory()


# -- exercises


def test_the_pen_and_paper_question():
    q = question("03.2")
    right = eval(q.problem.solution)
    assert q.check(right).state == q.check(1.24).state == "Correct"
    slips = {1 / right: "part of the old", 1.93: "copy takes", 0.194: "share", 9.927 / 1.927: "other way round"}
    for answer, word in slips.items():
        outcome = q.check(answer)
        assert outcome.state == "Not right" and word in outcome.sentence, answer


def reference():
    scope: dict = {}
    exec(question("03.1").problem.solution, scope)
    return scope["overlapped"]


@pytest.mark.timed
def test_what_a_cpu_can_see_of_the_overlap_is_checked_and_the_rest_not_guessed():
    q = question("03.1")
    outcome = q.check(lambda batches: [])
    assert outcome.state == "Not right" and "batches, step, side" in outcome.sentence
    if not machine.cuda_devices():
        outcome = q.check(reference())
        assert outcome.state == "CANNOT TELL" and outcome.sentence.startswith("no CUDA device here")


def test_the_reference_solution_returns_what_a_plain_loop_returns(log):
    batches = [Batch(k, log) for k in range(5)]
    assert reference()(batches, lambda x: x.k**2, "side") == [0, 1, 4, 9, 16]
    for k in range(5):
        at = log.index(("record", k, log))
        assert log[at - 1] == ("wait", "side") and ("copy", k, "side") in log[:at]
    assert reference()([], len, "side") == []
