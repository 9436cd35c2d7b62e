"""Traces of a CUDA device, recorded now: each planted fault is named, healthy loops are not, nothing is lost."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import record as planted
import torch
from trim import trimmed, write

from perflab import read_trace
from perflab.bench import machine
from perflab.bench.profiler import exported
from perflab.trace import faults, gaps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]

PLANS = planted.FAULTS | planted.HEALTHY


@pytest.fixture(scope="module")
def whole():
    """Each loop is recorded once; a graph that cannot be captured would spoil what follows, so it comes last."""
    taken: dict[str, dict] = {}

    def of(name: str) -> dict:
        if name not in taken:
            taken[name] = json.loads(exported(planted.record(PLANS[name], "cuda")))
            torch.cuda.empty_cache()
        return taken[name]

    return of


def union_of(whole: dict) -> tuple[int, int]:
    """Busy time and span in nanoseconds, by marking edges on one time line."""
    chosen = [e for e in whole["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    start = np.rint(np.array([e["ts"] for e in chosen], np.longdouble) * 1000).astype(np.int64)
    end = start + np.rint(np.array([e["dur"] for e in chosen], np.longdouble) * 1000).astype(np.int64)
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    depth = np.cumsum(np.repeat([1, -1], len(start))[order])
    lasts = np.diff(times[order])
    return int(lasts[depth[:-1] > 0].sum()), int(end.max() - start.min())


@pytest.mark.parametrize("name", PLANS)
def test_the_busy_share_is_that_of_the_raw_events(whole, name):
    trace = read_trace(whole(name))
    busy, span = union_of(whole(name))
    print(f"\n{name}: busy {trace.busy_share:.4f}, {trace!r}, idle {trace.idle}, warnings {trace.warnings}")
    assert trace.busy_ns == busy and trace.span_ns == span
    assert sum(p.end - p.start for p in trace.gap_pieces) == span - busy


@pytest.mark.parametrize("name", PLANS)
def test_a_planted_fault_is_named_with_its_place_and_a_healthy_loop_is_not(whole, name):
    plan, found = PLANS[name], read_trace(whole(name)).findings
    print("\n" + "\n".join(f.sentence for f in found))
    if not plan.fault:
        assert not found
        return
    first = found[-1 if plan.fault == faults.MEMORY else 0]
    assert first.name == plan.fault and plan.place in str(first.where), found


def test_each_launch_has_its_kernel(whole):
    trace = read_trace(whole("tiny_kernels"))
    assert trace.dropped_kernels == 0 and trace.launches == trace.kernels > 100
    assert trace.steps[-1].number == planted.WAIT + planted.WARMUP + planted.ACTIVE - 1


def test_a_graph_is_launched_once_a_step(whole):
    trace = read_trace(whole("graphed"))
    assert trace.graph_launches == planted.ACTIVE and trace.launches == 0
    assert trace.kernels > 20 * planted.ACTIVE and set(trace.idle) == {gaps.QUEUED}


def test_the_memory_that_peaks_is_what_the_allocator_counts():
    plan = planted.FAULTS["peak_in_backward"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trace = read_trace(json.loads(exported(planted.record(plan, "cuda"))))
    peak = torch.cuda.max_memory_allocated()
    assert trace.peak.bytes == pytest.approx(peak, rel=0.01)
    assert trace.peak.where.phase == "backward"


def test_kernel_times_are_those_of_torch():
    def step():
        (x @ x).relu_()

    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    theirs = sum(e.self_device_time_total for e in events if not e.is_user_annotation)
    trace = read_trace(profiler)
    assert trace.top(1000).time_s.sum() * 1e6 == pytest.approx(theirs, rel=1e-3)
    assert trace.dropped_kernels == 0 and trace.kernels >= 40


@pytest.mark.parametrize("name", PLANS)
def test_a_small_copy_reads_alike_and_names_no_machine(whole, name, tmp_path):
    path = tmp_path / "trace.json.gz"
    write(trimmed(whole(name)), path)
    small, large = read_trace(path), read_trace(whole(name))
    assert (small.busy_ns, small.span_ns, small.idle) == (large.busy_ns, large.span_ns, large.idle)
    assert [f.name for f in small.findings] == [f.name for f in large.findings]
    text = gzip.decompress(path.read_bytes()).decode()
    assert str(Path.home()) not in text and '"/' not in text and json.loads(text)["traceEvents"]
