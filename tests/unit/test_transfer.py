"""Copies between host and device: the arithmetic, the model, what is shown, what a machine without CUDA hears."""

import contextlib
import itertools
import math

import nbformat
import pytest
import torch
from torch.utils.data import DataLoader

from perflab import PerflabError, observe, paths, question, vary
from perflab.bench import machine
from perflab.bench.estimate import CANNOT, HOLDS, NOT
from perflab.bench.result import Metric
from perflab.loading import copies, timelines, transfer

ROUNDS = range(8)


def metric(**figures: float) -> Metric:
    """Rounds of different pace, alike for all values: only paired ratios are free of it."""
    rounds = {name: {r: x * (1 + r) for r in ROUNDS} for name, x in figures.items()}
    return Metric("time_s", "s", rounds, {"lost": "out of memory"})


# -- arithmetic


@pytest.mark.parametrize(("whole", "state"), [(8.0, HOLDS), (5.0, NOT)])
def test_the_sum_of_the_parts_is_taken_in_the_same_round(whole, state):
    m = metric(together=whole, copy=5.0, compute=3.0)
    e = transfer.over_sum(m, "together", ["copy", "compute"])
    assert e.lo == pytest.approx(whole / 8) and e.hi == pytest.approx(whole / 8) and e.n == len(ROUNDS)
    assert e.at_least(0.9).state == state


def test_hidden_copies_are_a_share_of_what_they_cost():
    m = metric(plain=8.0, side=5.75, bare=5.0)
    e = transfer.hidden_share(m, "side", "plain", "bare")
    assert e.mid == pytest.approx(0.75) and e.at_least(0.7).state == HOLDS
    assert transfer.hidden_share(m, "plain", "plain", "bare").mid == 0
    assert transfer.hidden_share(m, "bare", "plain", "bare").mid == pytest.approx(1)


def test_what_was_not_measured_says_why_and_judges_nothing():
    m = metric(plain=8.0, bare=8.0)
    for e, word in [
        (transfer.over_sum(m, "lost", ["plain"]), "out of memory"),
        (transfer.over_sum(m, "plain", ["bare", "lost"]), "out of memory"),
        (transfer.hidden_share(m, "plain", "plain", "bare"), "too short"),
        (transfer.hidden_share(m, "plain", "lost", "bare"), "out of memory"),
    ]:
        assert word in e.why and e.at_least(0.5).state == CANNOT


def test_no_common_round_is_said():
    m = Metric("time_s", "s", {"a": {0: 1.0}, "b": {1: 1.0}}, {})
    assert "no round" in transfer.over_sum(m, "a", ["b"]).why


def test_a_grid_is_each_way_at_each_size():
    grid = transfer.grid(["pageable", "pinned"], ["4 KiB", "1 MiB", "2 GiB"])
    assert len(grid) == 6
    assert grid["pinned 4 KiB"] == ("pinned", 4096) and grid["pageable 2 GiB"] == ("pageable", 2**31)


@pytest.mark.parametrize("size", ["64", "64 KB", "x MiB", "64KiB", 64, ""])
def test_a_size_that_is_none_is_one_sentence(size):
    with pytest.raises(PerflabError, match="64 KiB"):
        transfer.nbytes_of(size)


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

    def __init__(self, fault=0):
        self.fault, self.held = fault, {}

    def cudaHostRegister(self, pointer, nbytes, flags):
        if not self.fault:
            self.held[pointer] = nbytes
        return self.fault

    def cudaHostUnregister(self, pointer):
        del self.held[pointer]
        return 0


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


def test_the_explorer_draws_at_both_ends_of_every_slider():
    explorer = timelines.explore_copy()
    for name, control in explorer.controls.items():
        first = control.value
        for value in getattr(control, "options", None) or (control.min, control.max):
            control.value = value
            assert explorer.error is None, (name, value)
        control.value = first
    assert "model" in explorer.alt and "take turns" in explorer.caption.value


# -- what is shown


def recorded_result(source="here", asked=()):
    ways = {"pageable 4 KiB": 1, "pageable 1 MiB": 2, "pinned 4 KiB": 3, "pinned 1 MiB": 4}
    r = vary("copy", ways, lambda x: None, study="t.sizes", per="byte", work=lambda x: 4096 * x, budget_s=0.05)
    r.source, r.asked = source, list(asked)
    return r


def shown(monkeypatch, result, bound=None):
    out = []
    monkeypatch.setattr("IPython.display.display", lambda x, raw=False: out.append(x))
    copies.by_size(result, ["pageable", "pinned"], ["4 KiB", "1 MiB"], bound)
    return out


def test_ways_by_size_are_a_table_and_a_figure(monkeypatch):
    table, figure = shown(monkeypatch, recorded_result(), bound=63e9)
    assert table["text/html"].count("<tr>") == 3 and "GB/s" in table["text/html"]
    assert figure.data[:4] == b"\x89PNG" and "4 KiB, 1 MiB, for pageable, pinned" in figure.alt
    assert table["text/plain"].startswith("Result t.sizes: copy = ")


def test_without_a_measurement_there_is_a_table_of_reasons_and_no_figure(monkeypatch):
    bare = vary("copy", transfer.grid(["pageable", "pinned"], ["4 KiB", "1 MiB"]), print, study="t.no", needs=["cuda"])
    if not bare.reasons:
        pytest.skip("this machine has CUDA")
    (table,) = shown(monkeypatch, bare)
    assert table["text/html"].count("no CUDA device here") >= 4
    assert "no verdict below can tell" in copies.Origin(bare).sentence


def test_a_stand_in_is_named_in_words_and_plain_text_is_alike_everywhere():
    here, there = recorded_result(), recorded_result("some-gpu", ["no CUDA device here"])
    assert "measured here" in copies.Origin(here).sentence
    assert copies.Origin(there).sentence.startswith("Not measured here (no CUDA device here)")
    assert "some-gpu" in copies.Origin(there)._repr_mimebundle_()["text/html"]
    assert repr(copies.Origin(here)) == repr(copies.Origin(there))


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


def code_with(name: str) -> str:
    nb = nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4)
    return next(c.source for c in nb.cells if c.cell_type == "code" and f"def {name}(" in c.source)


def test_the_prefetcher_is_fifteen_lines_and_waits_before_it_queues_the_next_copy(monkeypatch):
    source = code_with("prefetched")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    log = Log()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: log)
    monkeypatch.setattr(torch.cuda, "stream", log.on)
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


def test_the_computation_is_sized_to_the_copy(monkeypatch):
    seconds, products = iter([4.8e-3, 0.06e-3]), []
    monkeypatch.setattr(transfer, "_fastest", lambda call, calls=1: next(seconds))
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(1))
    pair = transfer.Pair(256 * transfer.MIB, longer=1.5)
    pair._a = pair._b = pair._out = None
    pair.repeats = pair._sized()
    pair.compute()
    assert len(products) == 120
    pair.close()
    pair.close()
    assert pair.repeats == 0 and pair.pinned is None


# -- exercises


def test_the_pen_and_paper_question():
    q = question("03.2")
    right = eval(q.problem.solution)
    assert q.check(right).state == q.check(1.24).state == "Correct"
    for answer, word in [
        (1 / right, "part of the old"),
        (1 + 64 * 3 * 224 * 224 / 20e9 / 8e-3, "four"),
        (1.93, "copy takes"),
        (0.241, "share"),
        (0.194, "share"),
        (2, "equally long"),
        (9.927 / 1.927, "other way round"),
        (7, "bytes a second"),
        ("1.24", "number"),
        (True, "number"),
    ]:
        outcome = q.check(answer)
        assert outcome.state == "Not right" and word in outcome.sentence, answer


def reference():
    scope: dict = {}
    exec(question("03.1").problem.solution, scope)
    return scope["overlapped"]


@pytest.mark.timed
def test_what_a_cpu_can_see_of_the_overlap_is_checked_and_the_rest_not_guessed():
    q = question("03.1")
    called = "batches, step, side"
    for wrong, word in [(7, "function"), (lambda batches: [], called), (lambda: [], called)]:
        outcome = q.check(wrong)
        assert outcome.state == "Not right" and word in outcome.sentence
    if not machine.cuda_devices():
        outcome = q.check(reference())
        assert outcome.state == "CANNOT TELL" and outcome.sentence.startswith("no CUDA device here")


def test_the_reference_solution_returns_what_a_plain_loop_returns(monkeypatch):
    log = Log()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: log)
    monkeypatch.setattr(torch.cuda, "stream", log.on)
    batches = [Batch(k, log) for k in range(5)]
    assert reference()(batches, lambda x: x.k**2, "side") == [0, 1, 4, 9, 16]
    for k in range(5):
        at = log.index(("record", k, log))
        assert log[at - 1] == ("wait", "side") and ("copy", k, "side") in log[:at]
    assert reference()([], len, "side") == []
