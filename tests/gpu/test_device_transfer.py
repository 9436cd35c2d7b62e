"""Copies on a CUDA device: the rates, what overlaps with what, the prefetcher as it is taught, the exercise."""

import time

import nbformat
import pytest
import torch

from perflab import paths, question, vary
from perflab.bench import machine, timing
from perflab.loading.transfer import MIB, Pair, bus, grid, locked, random_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]
CELLS = [c.source for c in nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4).cells if c.cell_type == "code"]


def taught(*names: str) -> dict:
    """What the notebook's cells that define these functions define."""
    scope: dict = {}
    for source in [CELLS[0], *(s for s in CELLS[1:] if any(f"def {name}(" in s for name in names))]:
        exec(source, scope)
    return scope


# -- rates


def test_pinned_memory_is_no_slower_than_pageable_and_no_faster_than_the_bus():
    scope = taught("source")
    how = {"prepare": scope["source"], "per": "byte", "work": lambda v: v[1], "budget_s": 3}
    rates = vary("copy", grid(["pageable", "pinned"], ["64 MiB"]), scope["copy"], study="t.sizes", **how)
    print(f"\n{rates}", bus())
    assert not rates.reasons
    assert rates.ratio("pageable 64 MiB", "pinned 64 MiB").mid >= 1
    if link := bus().get("PCIe"):
        assert rates["bytes_per_s"].of("pinned 64 MiB").mid <= link["bytes_per_s"]


def test_pages_are_locked_inside_the_with_and_not_after():
    x = random_bytes(MIB)
    with pytest.raises(KeyError), locked(x):
        assert x.is_pinned()
        assert torch.equal(x.to("cuda", non_blocking=True).cpu(), x)
        raise KeyError
    assert not x.is_pinned()


def test_a_pinned_copy_that_does_not_block_returns_long_before_it_is_done():
    x = random_bytes(64 * MIB).pin_memory()
    whole = min(timing.wall(lambda: x.to("cuda"), blocks=7)[0])
    torch.cuda.synchronize()
    held = min(_returned(x) for _ in range(7))
    print(f"\nheld {held * 1e6:.0f} us of {whole * 1e6:.0f}")
    assert held < whole / 5


def _returned(x) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    x.to("cuda", non_blocking=True)
    return time.perf_counter() - began


# -- overlap


def test_a_side_stream_overlaps_and_one_stream_does_not():
    """The bars of an H200: side stream at most 0.6 of copy + compute, one stream at least 0.9."""
    scope, pair = taught("one_stream"), Pair(256 * MIB)
    ways = {name: scope[name] for name in ("copy_alone", "compute_alone", "one_stream", "side_stream")}
    how = {"prepare": lambda way: (way, pair.ready()), "study": "t.overlap", "budget_s": 6}
    times = vary("way", ways, lambda ready: ready[0](ready[1]), **how)
    assert not times.reasons, times.reasons
    one, side = (times["time_s"].of(way).mid for way in ("one_stream", "side_stream"))
    copying, computing = (times["time_s"].of(way).mid for way in ("copy_alone", "compute_alone"))
    print(f"\n{times}")
    assert 0.5 < copying / computing < 2
    assert side <= 0.6 * (copying + computing) and one >= 0.9 * (copying + computing)


# -- the prefetcher


def sums(feed, batches, side, repeats=3):
    weight = timing.random_input(1024, 1024, device="cuda") / 32
    out = [torch.relu(x @ weight).sum() for _ in range(repeats) for (x,) in feed(batches, side)]
    return torch.stack(out).tolist()


def pinned_batches(n=6):
    return [(torch.randn(16384, 1024).add_(k).pin_memory(),) for k in range(n)]


def test_the_prefetcher_gives_the_results_of_the_plain_loop():
    scope, batches = taught("prefetched", "plain"), pinned_batches()
    side = torch.cuda.Stream()
    expected = sums(scope["plain"], batches, side)
    assert len(set(expected)) >= len(batches)
    assert sums(scope["prefetched"], batches, side) == pytest.approx(expected, rel=1e-4)


def test_without_its_wait_the_prefetcher_gives_wrong_results():
    source = next(s for s in CELLS if "def prefetched(" in s)
    assert source.count("here.wait_stream(side)") == 1
    scope = taught("plain")
    exec(source.replace("here.wait_stream(side)", "pass"), scope)
    batches, side = pinned_batches(), torch.cuda.Stream()
    expected = torch.tensor([x[-1, -1].item() for (x,) in batches])
    got = torch.stack([x[-1, -1].clone() for (x,) in scope["prefetched"](batches, side)]).cpu()  # read at once
    torch.cuda.synchronize()
    assert (got != expected).any()


def test_the_prefetcher_hides_most_of_the_copies():
    scope = taught("prefetched", "make_step", "training")
    loops = ["pinned", "pinned, prefetched", "on the device"]
    times = vary("batches", loops, scope["epoch"], prepare=scope["training"], study="t.prefetch", budget_s=5)
    assert not times.reasons, times.reasons
    in_turn, overlapped, bare = (times["time_s"].of(loop).mid for loop in loops)
    print(f"\n{times}")
    assert in_turn - overlapped > 0.5 * (in_turn - bare)


# -- reads


def test_a_read_without_a_synchronise_is_wrong_and_with_one_right():
    scope = taught("reads", "event")
    early = [scope["reads"](scope["hasty"](kind))["wrong_reads"] for kind in ("to('cpu')", "into pinned memory")]
    print(f"\nwrong of 20: {early}")
    assert min(early) > 0
    assert torch.zeros(8, device="cuda").to("cpu", non_blocking=True).is_pinned()
    for wait in (torch.cuda.synchronize, scope["event"]):
        assert scope["reads"](scope["waiting"](wait))["wrong_reads"] == 0


def test_the_loader_pins_what_it_knows_and_nothing_else():
    scope = taught("__init__", "pinned")
    for collate, expected in ((torch.stack, 4), (scope["Box"], 0), (scope["PinnedBox"], 4)):
        assert scope["pinned"](collate)["pinned_batches"] == expected


# -- the exercise


def answer(old: str, new: str):
    """The reference solution with one line changed."""
    source = question("03.1").problem.solution
    assert old in source
    scope: dict = {}
    exec(source.replace(old, new), scope)
    return scope["overlapped"]


def test_the_reference_solution_is_correct():
    outcome = question("03.1").check(answer("", ""))
    print(f"\n{outcome}")
    assert outcome.state == "Correct"


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("here.wait_stream(side)", "pass", "wait"),
        ("coming.record_stream(here)", "pass", "record_stream"),
        ("torch.cuda.stream(side)", "torch.cuda.stream(here)", "hidden"),
        ("return results", "return results[:-1]", "list"),
    ],
    ids=["no wait", "no record", "one stream", "one is missing"],
)
def test_a_wrong_solution_hears_what_is_wrong(old, new, word):
    outcome = question("03.1").check(answer(old, new))
    print(f"\n{outcome}")
    assert outcome.state == "Not right" and word in outcome.sentence


def test_a_wait_on_the_host_is_right_but_hides_nothing():
    outcome = question("03.1").check(lambda batches, step, side: [step(x.to("cuda")) for x in batches])
    assert outcome.state == "Not right" and "hidden" in outcome.sentence
