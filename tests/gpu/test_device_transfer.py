"""Copies on a CUDA device: the rates, what overlaps with what, the prefetcher as it is taught, the exercise."""

import time

import nbformat
import pytest
import torch

from perflab import paths, question, vary
from perflab.bench import machine, timing
from perflab.loading.transfer import MIB, Pair, bus, grid, hidden_share, locked, over_sum, random_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]


def taught(*names: str) -> dict:
    """What the notebook's cells that define these functions define."""
    nb = nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4)
    cells = [c.source for c in nb.cells if c.cell_type == "code"]
    scope: dict = {}
    for source in [cells[0], *(s for s in cells[1:] if any(f"def {name}(" in s for name in names))]:
        exec(source, scope)
    return scope


def source_of(name: str) -> str:
    nb = nbformat.read(paths.NOTEBOOKS / "03_host_to_device.ipynb", 4)
    return next(c.source for c in nb.cells if c.cell_type == "code" and f"def {name}(" in c.source)


# -- rates


def test_pinned_memory_is_no_slower_than_pageable_and_no_faster_than_the_bus():
    scope = taught("source")
    ways = grid(["pageable", "pinned"], ["64 MiB"])
    seen = vary(
        "copy",
        ways,
        scope["copy"],
        prepare=scope["source"],
        study="t.sizes",
        per="byte",
        work=lambda v: v[1],
        budget_s=3,
    )
    print("\n" + str(seen), bus())
    assert not seen.reasons
    assert seen.ratio("pageable 64 MiB", "pinned 64 MiB").mid >= 1
    if link := bus().get("PCIe"):
        assert seen["bytes_per_s"].of("pinned 64 MiB").mid <= link["bytes_per_s"]


def test_pages_are_locked_inside_the_with_and_not_after():
    x = random_bytes(MIB)
    with locked(x):
        assert x.is_pinned()
        assert torch.equal(x.to("cuda", non_blocking=True).cpu(), x)
    assert not x.is_pinned()
    with pytest.raises(KeyError), locked(x):
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
    scope = taught("one_stream")
    ways = {name: scope[name] for name in ("copy_alone", "compute_alone", "one_stream", "side_stream")}
    pair = Pair(256 * MIB)
    seen = vary(
        "way",
        ways,
        lambda ready: ready[0](ready[1]),
        prepare=lambda way: (way, pair.ready()),
        study="t.overlap",
        budget_s=6,
    )
    assert not seen.reasons, seen.reasons
    parts = ["copy_alone", "compute_alone"]
    one, side = (over_sum(seen["time_s"], way, parts) for way in ("one_stream", "side_stream"))
    print(f"\none stream {one}, side stream {side}\n{seen}")
    assert 0.5 < seen.ratio("copy_alone", "compute_alone").mid < 2
    assert side.mid <= 0.6 and one.mid >= 0.9


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
    source = source_of("prefetched")
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
    seen = vary("batches", loops, scope["epoch"], prepare=scope["training"], study="t.prefetch", budget_s=5)
    hidden = hidden_share(seen["time_s"], "pinned, prefetched", "pinned", "on the device")
    print(f"\nhidden {hidden}\n{seen}")
    assert not seen.reasons, seen.reasons
    assert hidden.mid > 0.5


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
    assert scope["pinned"](torch.stack)["pinned_batches"] == 4
    assert scope["pinned"](scope["Box"])["pinned_batches"] == 0
    assert scope["pinned"](scope["PinnedBox"])["pinned_batches"] == 4


# -- the exercise


def answer(*changes: tuple[str, str]):
    source = question("03.1").problem.solution
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    scope: dict = {}
    exec(source, scope)
    return scope["overlapped"]


def test_the_reference_solution_is_correct():
    outcome = question("03.1").check(answer())
    print(f"\n{outcome}")
    assert outcome.state == "Correct"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ([("here.wait_stream(side)", "pass")], "wait"),
        ([("coming.record_stream(here)", "pass")], "record_stream"),
        ([("torch.cuda.stream(side)", "torch.cuda.stream(here)")], "hidden"),
        ([("return results", "return results[:-1]")], "list"),
    ],
    ids=["no wait", "no record", "one stream", "one is missing"],
)
def test_a_wrong_solution_hears_what_is_wrong(changes, word):
    outcome = question("03.1").check(answer(*changes))
    print(f"\n{outcome}")
    assert outcome.state == "Not right" and word in outcome.sentence


def test_a_wait_on_the_host_is_right_but_hides_nothing():
    def slow(batches, step, side):
        return [step(x.to("cuda")) for x in batches]

    outcome = question("03.1").check(slow)
    assert outcome.state == "Not right" and "hidden" in outcome.sentence
