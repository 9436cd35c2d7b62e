"""Reading traces: busy time, gaps and their causes, what was launched, bad files, faults that are named."""

import gzip
import itertools
import json
import pickle
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import record as planted
import torch
from trim import trimmed, write

from perflab import PerflabError, paths, read_trace
from perflab.bench.profiler import exported
from perflab.trace import faults, gaps
from perflab.trace.read import own_frame, recorded
from perflab.trace.trace import short

TRACES = paths.DATA / "traces"
MAIN, BACKWARD, LOADER = 100, 101, 102
MULTIPROCESSORS = 132


class Fake:
    """Writes the events of a trace as torch.profiler does. Times in microseconds."""

    def __init__(self, properties: bool = True):
        self.events, self.ids = [], itertools.count(1)
        self.properties = [{"id": 0, "name": "Made GPU", "numSms": MULTIPROCESSORS}] if properties else []

    def span(self, category: str, name: str, start, end, thread: int = MAIN, pid=77, **arguments):
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, "ts": start, "dur": end - start}
        self.events.append(event | ({"args": arguments} if arguments else {}))
        return self

    def launch(
        self, at, start, end, name="k", call="cudaLaunchKernel", grid=(1000, 1, 1), lasts=3, thread=MAIN, **more
    ):
        number = more.pop("correlation", None) or next(self.ids)
        if call:
            self.span("cuda_runtime", call, at, at + lasts, thread, correlation=number)
        if start is not None:
            self.on_device("kernel", name, start, end, number, grid=list(grid), block=[128, 1, 1], **more)
        return self

    def on_device(self, category, name, start, end, number, stream=7, device=0, **more):
        more |= {"correlation": number, "stream": stream, "device": device}
        return self.span(category, name, start, end, stream, device, **more)

    def copy(self, at, returns, start, end, name="Memcpy HtoD (Pageable -> Device)", wait=None, operator="aten::to"):
        """A copy, and with `wait` = (start, end) the cudaStreamSynchronize after it, both in one operator."""
        number = next(self.ids)
        self.span("cpu_op", operator, at - 1, max(returns, wait[1] if wait else 0) + 1)
        self.span("cuda_runtime", "cudaMemcpyAsync", at, returns, correlation=number)
        self.on_device("gpu_memcpy", name, start, end, number, bytes=4096)
        if wait:
            self.wait(*wait)
        return self

    def item(self, at, start, end):
        """`.item()`: a copy to the host that is waited for."""
        return self.copy(at, end + 2, start, end, "Memcpy DtoH (Device -> Pageable)", (end + 3, end + 5), "aten::item")

    def wait(self, start, end, call="cudaStreamSynchronize", thread=MAIN):
        return self.span("cuda_runtime", call, start, end, thread)

    def note(self, name, start, end, thread=MAIN):
        return self.span("user_annotation", name, start, end, thread)

    @property
    def whole(self) -> dict:
        return {"schemaVersion": 1, "deviceProperties": self.properties, "traceEvents": self.events}

    def read(self, **named):
        return read_trace(self.whole, **named)


def swept(intervals: list[tuple[int, int]]) -> int:
    """The length of a union by a sweep line: another way than the reader's."""
    edges = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    total = depth = 0
    for (at, step), (following, _) in itertools.pairwise(edges):
        depth += step
        total += (following - at) * (depth > 0)
    return total


def nanoseconds(trace: dict, device=0) -> list[tuple[int, int]]:
    """The device's intervals, by numpy's rounding and not by the reader's decimals."""
    chosen = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    chosen = [e for e in chosen if e["args"]["device"] == device]
    start = np.rint(np.array([e["ts"] for e in chosen], np.longdouble) * 1000).astype(np.int64)
    lasts = np.rint(np.array([e["dur"] for e in chosen], np.longdouble) * 1000).astype(np.int64)
    return list(zip(start.tolist(), (start + lasts).tolist(), strict=True))


def adds_up(trace):
    """The gaps are what is not busy, to the nanosecond."""
    assert sum(p.end - p.start for p in trace.gap_pieces) == trace.span_ns - trace.busy_ns
    assert all(p.start < p.end for p in trace.gap_pieces)
    assert all(a.end <= b.start for a, b in itertools.pairwise(trace.gap_pieces))
    assert trace.busy_share + sum(trace.idle.values()) == pytest.approx(1 if trace.span_ns else 0, abs=1e-12)


def lengths(trace) -> Counter:
    """Nanoseconds of the gaps by cause."""
    adds_up(trace)
    sums: Counter = Counter()
    for piece in trace.gap_pieces:
        sums[piece.cause] += piece.end - piece.start
    return sums


# -- busy time


@pytest.mark.parametrize(("lasts", "every"), [(1000, 10_000), (6250, 71_500), (1, 3), (999_999, 10**6), (3, 3)])
def test_the_busy_share_of_a_known_duty_is_exact(lasts, every):
    """Nanoseconds; the times of day are near the end of a float's digits, as in torch's files."""
    fake, n = Fake(), 50
    for k in range(n):
        start = 5_141_794_360_879_939 + k * every
        fake.launch(start / 1000 - 20, start / 1000, start / 1000)
        fake.events[-1]["dur"] = lasts / 1000
    trace = fake.read()
    assert trace.busy_ns == n * lasts
    assert trace.span_ns == (n - 1) * every + lasts
    assert Fraction(trace.busy_share).limit_denominator(10**9) == Fraction(n * lasts, (n - 1) * every + lasts)
    adds_up(trace)


def test_kernels_that_overlap_count_once():
    trace = Fake().launch(0, 10, 20).launch(1, 15, 30, stream=8).launch(2, 18, 19, stream=9).launch(3, 40, 50).read()
    assert (trace.busy_ns, trace.span_ns) == (30_000, 40_000)


@pytest.mark.parametrize("seed", range(20))
def test_random_intervals_have_the_length_that_a_sweep_line_finds(seed):
    pick, fake = random.Random(seed), Fake()
    for _ in range(pick.choice([1, 2, 30, 300])):
        start = pick.randrange(1, 3_000_000)
        lasts = pick.choice([0, 1, pick.randrange(1, 200_000)])
        fake.launch(start / 1000 - pick.uniform(-5, 40), start / 1000, start / 1000, stream=pick.randrange(3))
        fake.events[-1]["dur"] = lasts / 1000
    expected = nanoseconds(fake.whole)
    trace = fake.read()
    assert trace.busy_ns == swept(expected)
    some = [i for i in expected if i[1] > i[0]]
    assert trace.span_ns == (max(e for _, e in some) - min(s for s, _ in some) if some else 0)
    adds_up(trace)


# -- why the device was idle


def paced(fake: Fake, n=30, every=10.0, lasts=2.0, start=0.0) -> Fake:
    """A launch-bound chain: each kernel is over before the next is launched."""
    for k in range(n):
        at = start + k * every
        fake.span("cpu_op", "aten::add", at - 2, at + 5).launch(at, at + 5, at + 5 + lasts)
    return fake.note("forward", start - 3, start + n * every)


def steps(one, n=5, every=1000.0) -> Fake:
    """A loop: `one(fake, t)` writes the events of the step that begins at t."""
    fake = Fake()
    for k in range(n):
        one(fake.note(f"ProfilerStep#{k}", every * k, every * (k + 1)), every * k)
    return fake


def test_late_launches_are_the_host():
    trace = paced(Fake()).read()
    assert trace.idle == {gaps.HOST: pytest.approx(8 * 29 / (290 + 2))}
    assert {(g.place.phase, g.place.operator) for g in trace.gaps} <= {("forward", "aten::add"), ("forward", "")}
    assert [f.name for f in trace.findings] == [faults.TINY]
    assert trace.findings[0].where.phase == "forward" and "30 launches" in trace.findings[0].sentence
    adds_up(trace)


def test_kernels_that_were_launched_in_time_are_not_the_host():
    fake = Fake()
    for k in range(30):
        fake.launch(4 * k, 200 + 10 * k, 208 + 10 * k)
    trace = fake.read()
    assert set(trace.idle) == {gaps.QUEUED} and not trace.findings


def reads_a_value(fake, t):
    fake.note("forward", t + 1, t + 990).span("python_function", "train.py(12): largest", t + 20, t + 900)
    fake.launch(t + 10, t + 15, t + 800).item(t + 30, t + 801, t + 803)


def copies_pageable(fake, t):
    fake.copy(t + 10, t + 400, t + 20, t + 402, wait=(t + 401, t + 404)).launch(t + 420, t + 425, t + 1000)


def copies_in_turn(fake, t):
    fake.copy(t - 500, t - 490, t, t + 300, "Memcpy HtoD (Pinned -> Device)").launch(t - 480, t + 300, t + 1000)


def allocates(fake, t):
    fake.wait(t + 500, t + 980, "cudaHostAlloc").launch(t + 990, t + 995, t + 1450)


def allocates_out_of_memory(fake, t):
    """torch's allocator waits, frees what it cached and asks again, all inside of one operator."""
    fake.span("cpu_op", "aten::mm", t + 490, t + 999).wait(t + 495, t + 505, "cudaDeviceSynchronize")
    fake.wait(t + 505, t + 700, "cudaFree").wait(t + 700, t + 980, "cudaMalloc").launch(t + 990, t + 995, t + 1495)


def logs(fake, t):
    fake.span("python_function", "train.py(40): log", 2 * t + 20, 2 * t + 1500)
    fake.launch(2 * t + 1600, 2 * t + 1605, 2 * t + 2010)


@pytest.mark.parametrize(
    ("step", "name", "place", "share"),
    [
        (reads_a_value, faults.SYNC, "aten::item, in forward, train.py(12): largest", (4 * 212 + 5) / 4788),
        (copies_pageable, faults.PAGEABLE, "aten::to", (5 * 382 + 4 * 20 + 5 * 23) / 4980),
        (copies_in_turn, faults.IN_TURN, "aten::to", 5 * 300 / 5000),
        (allocates, faults.ALLOCATE, "outside of any annotation", 4 * 480 / 4455),
        (allocates_out_of_memory, faults.ALLOCATE, "aten::mm", 4 * 475 / 4500),
        (logs, faults.HOST, "train.py(40): log", 4 * 1595 / 8405),
    ],
)
def test_a_fault_is_named_with_its_place_and_its_share(step, name, place, share):
    trace = steps(step).read()
    [fault] = trace.findings
    assert (fault.name, str(fault.where)) == (name, place)
    assert fault.share == pytest.approx(share, rel=0.01) and fault.gain == pytest.approx(1 / (1 - fault.share))
    adds_up(trace)


def test_a_wait_costs_no_more_than_it_held_the_host():
    """The host waits for 12 us, then works 500 us: without the wait, most of the gap would still be there."""
    fake = Fake().launch(0, 5, 100).wait(90, 102, "cudaDeviceSynchronize").launch(600, 605, 700)
    assert lengths(fake.read()) == {gaps.SYNC: 12_000, gaps.HOST: 505_000 - 12_000}


def test_no_wait_is_charged_with_more_than_it_lasted():
    """Whatever the trace: random kernels, launches and waits, in one thread."""
    most = 0.0
    for seed in range(40):
        pick, fake, at, free = random.Random(seed), Fake(), 0, 0  # whole microseconds
        lasted = {}
        for _ in range(60):
            at += pick.choice([1, 5, 30])
            if pick.random() < 0.3:
                ends = max(at + 2, free + pick.choice([-3, 1, 2]))
                fake.wait(at, ends)
                lasted[500 * (at + ends)] = 1000 * (ends - at)
                at = ends
            else:
                start = max(at + 4, free + 1)
                free = start + pick.choice([1, 3, 100])
                fake.launch(at, start, free, lasts=1)
        charged = dict.fromkeys(lasted, 0)
        trace = fake.read()
        for p in trace.gap_pieces:
            if p.cause == gaps.SYNC:
                charged[p.time] += p.end - p.start
        most = max(most, *(charged[t] / lasted[t] for t in lasted))
        adds_up(trace)
    assert 0.9 < most <= 1


def test_the_host_may_catch_up_over_several_gaps():
    """A long wait, then kernels shorter than their launches: the first gaps are the wait's too."""
    fake = Fake().launch(0, 5, 1000).wait(10, 1001)
    assert set(paced(fake, 20, start=1010.0).read().idle) == {gaps.SYNC}


def test_a_wait_when_the_device_is_done_already_costs_what_it_lasts():
    assert lengths(paced(paced(Fake(), 10).wait(110, 113), 10, start=150.0).read())[gaps.SYNC] == 3_000


@pytest.mark.parametrize(
    "name", ["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "next batch", "data", "load data"]
)
def test_waiting_for_data_is_named(name):
    trace = steps(lambda fake, t: fake.note(name, t + 1, t + 600).launch(t + 610, t + 615, t + 1000)).read()
    assert trace.idle[gaps.DATA] == pytest.approx(4 * 599 / trace.span_ns * 1e3)
    [found] = trace.findings
    assert found.name == faults.DATA and found.where.phase == name
    adds_up(trace)


def test_data_is_the_cause_though_the_host_waited_for_the_device_before():
    def step(fake, t):
        fake.launch(t, t + 5, t + 300).item(t + 20, t + 300, t + 302).note("next batch", t + 310, t + 990)

    trace = steps(step, 4).read()
    assert trace.findings[0].name == faults.DATA and trace.idle[gaps.DATA] > 10 * trace.idle.get(gaps.SYNC, 0)


def test_what_a_loader_thread_does_is_not_the_loop():
    fake = paced(Fake(), 30).note("load data", 0, 300, LOADER).wait(0, 300, "cudaEventSynchronize", LOADER)
    assert set(fake.read().idle) == {gaps.HOST}


def test_pinned_copies_beside_the_work_are_no_fault():
    def step(fake, t):
        fake.launch(t - 480, t, t + 990).copy(t - 470, t - 465, t + 10, t + 400, "Memcpy HtoD (Pinned -> Device)")

    assert not steps(step).read().findings


@pytest.mark.parametrize(
    ("category", "name", "said"),
    [
        ("", "", "most of it outside of any"),
        ("user_annotation", "forward", "most of it in forward"),
        ("cpu_op", "aten::item", "most of it at aten::item"),
        ("python_function", "a.py(3): f", "most of it at a.py(3): f"),
    ],
)
def test_a_place_reads_as_part_of_its_sentence(category, name, said):
    def step(fake, t):
        fake.wait(t + 20, t + 805, "cudaDeviceSynchronize").launch(t + 10, t + 15, t + 800)
        fake.span(category, name, t + 1, t + 900)

    [found] = steps(step, 6).read().findings
    assert said in found.sentence


def test_the_backward_thread_has_the_phase_of_the_main_thread():
    fake = Fake().note("backward", 0, 1000).note("ProfilerStep#3", -1, 1001)
    for at in range(10, 400, 20):
        fake.span("cpu_op", f"autograd::engine::evaluate_function: Mul{at}", at, at + 15, BACKWARD)
        fake.launch(at + 5, at + 10, at + 12, thread=BACKWARD)
    trace = fake.read()
    assert {(g.place.step, g.place.phase) for g in trace.gaps} == {(3, "backward")}
    assert trace.places.main != trace.launched_by.thread[0]


def test_a_kernel_whose_launch_is_missing_is_unknown_and_doubted():
    trace = Fake().launch(0, 5, 10).launch(0, 30, 40, call="").read()
    assert set(trace.idle) == {gaps.UNKNOWN} and not trace.is_early.any() and trace.dropped_kernels == 0
    assert "does not have" in trace.warnings[0]


def test_a_kernel_that_was_launched_before_the_recording_came_in_time():
    fake = Fake().launch(0, 5, 10, call="").launch(0, 30, 40, call="").launch(0, 50, 60)
    trace = fake.read()
    assert set(trace.idle) == {gaps.QUEUED} and trace.is_early.tolist() == [True, True, False] and not trace.warnings


# -- what was launched


def test_launches_without_a_kernel_are_dropped_kernels_and_said():
    fake = paced(Fake(), 10)
    assert fake.read().warnings == []
    trace = fake.launch(200, None, None).launch(210, None, None, call="cuLaunchKernelEx").read()
    assert (trace.launches, trace.kernels, trace.dropped_kernels) == (12, 10, 2)
    [warning] = trace.warnings
    assert "2 of 12 launches" in warning and repr(trace).endswith(warning)


def test_a_graph_is_one_launch_of_many_kernels():
    fake = Fake()
    fake.span("cuda_runtime", "cudaGraphLaunch", 0, 5, correlation=900)
    for k in range(40):
        fake.on_device("kernel", "k", 10 + 5 * k, 14 + 5 * k, 900, grid=[500, 1, 1])
    trace = fake.on_device("gpu_memset", "Memset (Device)", 300, 301, 900).read()
    assert (trace.graph_launches, trace.launches, trace.kernels, trace.dropped_kernels) == (1, 0, 40, 0)
    assert set(trace.idle) == {gaps.QUEUED} and not trace.findings
    adds_up(trace)


def test_copies_and_memsets_are_no_launches():
    fake = Fake().launch(0, 5, 10).copy(20, 25, 26, 40)
    fake.span("cuda_runtime", "cudaMemsetAsync", 50, 52, correlation=950)
    trace = fake.on_device("gpu_memset", "Memset (Device)", 55, 56, 950).read()
    assert (trace.launches, trace.kernels, trace.dropped_kernels) == (1, 1, 0)


def test_kernels_with_few_blocks_are_kept_apart_from_gaps():
    def step(fake, t):
        fake.launch(t - 100, t, t + 800, "scan", grid=(2, 1, 1)).launch(t - 90, t + 800, t + 1000)

    trace = steps(step, 6).read()
    assert trace.busy_share == 1
    assert trace.small_share == pytest.approx(0.8)
    assert trace.is_small.sum() == 6 and trace.top().loc["scan", "blocks"] == 2
    [found] = trace.findings
    assert found.name == faults.ONE_BLOCK and found.share == pytest.approx(0.8 * (1 - 2 / MULTIPROCESSORS))


def test_small_kernels_beside_a_large_one_waste_nothing():
    trace = Fake().launch(0, 10, 100).launch(1, 20, 60, grid=(1, 1, 1), stream=8).read()
    assert trace.small_share == 0 and trace.is_small.sum() == 1


def test_few_blocks_beside_other_kernels_or_of_a_collective_are_no_fault():
    beside, together, alone = Fake(), Fake(), Fake()
    for k in range(6):
        t = 1000.0 * k
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        alone.launch(t - 90, t, t + 500).launch(t - 80, t + 500, t + 1000, name, grid=(24, 1, 1), stream=30)
        beside.launch(t - 90, t, t + 1000).launch(t - 80, t + 100, t + 900, "scan", grid=(2, 1, 1), stream=30)
        for stream in (7, 8, 9):
            together.launch(t - 90, t, t + 1000, "third", grid=(MULTIPROCESSORS // 3, 1, 1), stream=stream)
    assert alone.read().findings == beside.read().findings == together.read().findings == []


def test_without_the_number_of_multiprocessors_nothing_is_said_of_blocks():
    trace = Fake(properties=False).launch(0, 10, 1000, grid=(1, 1, 1)).read()
    assert trace.multiprocessors is None and not trace.is_small.any() and not trace.findings
    assert trace.name == "device 0"


def test_top_kernels_by_the_sum_of_their_own_time():
    fake = Fake()
    fake.launch(0, 10, 20, "void at::native::add<float>(int)").launch(1, 20, 40, "void at::native::add<float>(int)")
    fake.launch(2, 40, 45, "gemm").copy(50, 60, 50, 59)
    top = fake.read().top(2)
    assert list(top.index) == ["add", "Memcpy HtoD (Pageable -> Device)"]
    assert top.time_s.tolist() == pytest.approx([30e-6, 9e-6]) and top.calls.tolist() == [2, 1]
    assert top.share.tolist() == pytest.approx([30 / 44, 9 / 44])


def test_names_of_kernels_are_short():
    functor = "at::native::CUDAFunctor_add<float>"
    name = f"void at::native::vectorized_elementwise_kernel<4, {functor}, std::array<char*, 3>>(int, {functor})"
    assert short(name) == "vectorized_elementwise_kernel<CUDAFunctor_add>"
    assert short("void at::native::(anonymous namespace)::layer_norm<float, 32u>(long") == "layer_norm"
    for plain in ("ampere_sgemm_128x64_tn", "triton_poi_fused_add_0", "Memcpy DtoH (Device -> Pinned)"):
        assert short(plain) == plain


def test_a_wait_once_is_how_a_loss_is_logged():
    fake = Fake()
    for k in range(8):
        t = 1000.0 * k
        fake.note(f"ProfilerStep#{k}", t - 900, t + 90)
        fake.launch(t - 800, t, t + 1000 - (150 if k == 4 else 1))
    trace = fake.item(4100, 4850, 4852).read()
    assert trace.busy_share < 0.99 and not trace.findings


@pytest.mark.parametrize(("every", "named"), [(1, True), (2, True), (3, True), (10, False)])
def test_waits_now_and_then_that_cost_much_are_named(every, named):
    """The device is as idle after each: the host was held for a step, and does not get ahead again for several."""

    def step(fake, t):
        fake.launch(t + 30, t + 35, t + 950)
        if t / 1000 % every == 0 and (t or named):
            fake.wait(t + 40, t + 952)

    assert [f.name for f in steps(step, 12).read().findings] == [faults.SYNC] * named


# -- memory


def allocating(levels: dict[str, list[int]], steps=3) -> Fake:
    """Steps whose allocated MiB follow the levels in forward and backward."""
    fake = Fake().launch(0, 5, 10)
    for k in range(steps):
        t = 1000.0 * (k + 1)
        fake.span("user_annotation", f"ProfilerStep#{k}", t, t + 990)
        fake.span("user_annotation", "forward", t + 1, t + 400).span("user_annotation", "backward", t + 410, t + 900)
        fake.span("cpu_op", "aten::linear", t + 2, t + 399)
        fake.span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", t + 420, t + 890, BACKWARD)
        for phase, begins, thread in (("forward", 10, MAIN), ("backward", 430, BACKWARD)):
            for i, mib in enumerate(levels[phase]):
                where = {"Device Type": 1, "Device Id": 0, "Total Allocated": (mib + k) << 20, "Bytes": 1}
                event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 77, "tid": thread}
                fake.events.append(event | {"ts": t + begins + 10 * i, "args": where})
    return fake


def test_the_place_where_memory_peaks():
    trace = allocating({"forward": [100, 500], "backward": [480, 300, 120]}).read()
    assert trace.peak.bytes == 502 << 20
    assert (trace.peak.where.step, trace.peak.where.phase, trace.peak.where.operator) == (2, "forward", "aten::linear")
    assert not trace.findings


def test_a_peak_in_backward_that_passes_is_named():
    trace = allocating({"forward": [100, 200], "backward": [210, 900, 250]}).read()
    [found] = trace.findings
    assert found.name == faults.MEMORY and found.where.phase == "backward" and found.where.step == 2
    assert found.share == pytest.approx((902 - 252) / 902)


def test_gradients_that_stay_are_no_fault():
    trace = allocating({"forward": [100, 200], "backward": [210, 900, 880]}).read()
    assert trace.peak.where.phase == "backward" and not trace.findings


def test_without_allocations_there_is_no_peak():
    assert paced(Fake()).read().peak is None


# -- files


def texts() -> dict[str, tuple[str, str]]:
    good = json.dumps(paced(Fake(), 5).whole)
    cut = good[: good.index('"aten::add"', 1500) + 5]
    return {
        "empty": ("", "is empty"),
        "blank": ("  \n ", "cut short|is empty"),
        "text": ("Traceback (most recent call last)", "is no JSON"),
        "html": ("<html></html>", "is no JSON"),
        "another JSON": ('{"cells": [], "nbformat": 4}', "no list of traceEvents"),
        "no list": ('{"traceEvents": {}}', "no list of traceEvents"),
        "no events": ('{"traceEvents": []}', "holds no events"),
        "numbers": ("[1, 2, 3]", "none that torch.profiler writes"),
        "no time": ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "none that torch.profiler writes"),
        "a wrong time": ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon"}]}', "none that torch"),
        "a name that is none": ('[{"ph": "X", "cat": "kernel", "name": 5, "ts": 1}]', "none that torch"),
        "a number without end": ('[{"ts": ' + "9" * 5000 + "}]", "no JSON"),
        "brackets without end": ("[" * 100_000, "no JSON"),
        "cut in an event": (cut, "cut short"),
        "cut at the end": (good[:-2], "cut short"),
        "broken inside": (good.replace('"ph"', "ph", 8).replace('ph": "X"', '"ph": "X"', 1), "no JSON|cut short"),
        "no device": (json.dumps({"traceEvents": [e for e in paced(Fake(), 5).events if e["cat"] != "kernel"]}),
                      "0 kernels recorded: .* has 11 events"),
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["json", "gz"])
@pytest.mark.parametrize("case", texts())
def test_what_is_no_trace_is_one_sentence(case, packed, tmp_path):
    text, expected = texts()[case]
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(PerflabError, match=expected) as caught:
        read_trace(path)
    assert "trace.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_cut_anywhere_is_one_sentence(tmp_path):
    path, pick = tmp_path / "trace.json.gz", random.Random(5)
    plain = json.dumps(paced(Fake(), 12).whole).encode()
    for whole in (plain, gzip.compress(plain)):
        for end in sorted(pick.sample(range(1, len(whole) - 1), 50)):
            path.write_bytes(whole[:end])
            with pytest.raises(PerflabError, match=r"cut short|no JSON at its beginning|damaged") as caught:
                read_trace(path)
            assert "\n" not in str(caught.value)


def test_a_pickle_is_not_loaded(tmp_path):
    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    (tmp_path / "trace.pt").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(PerflabError, match="no JSON"):
        read_trace(tmp_path / "trace.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("source", ["nowhere/trace.json", Path("/"), "", "a\0.json", 7, None])
def test_a_source_that_is_none_says_what_is_one(source):
    with pytest.raises(PerflabError, match=r"export_chrome_trace|cannot be read"):
        read_trace(source)


def test_all_ways_to_give_a_trace_are_alike(tmp_path):
    whole = paced(Fake()).launch(400, 405.123, 409.456).whole
    plain, packed, bare, spaced = (tmp_path / f"{n}.json" for n in ("plain", "packed", "bare", "spaced"))
    plain.write_text(json.dumps(whole | {"traceName": "last"}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    bare.write_text(json.dumps(whole["traceEvents"]))
    late = {"traceEvents": whole["traceEvents"], "deviceProperties": whole["deviceProperties"], "x": [1, {"y": "]"}]}
    spaced.write_text(json.dumps(late, indent=4))
    expected = read_trace(whole)
    for source in (plain, str(packed), spaced, bare, whole["traceEvents"]):
        got = read_trace(source)
        assert (got.busy_ns, got.span_ns, got.idle) == (expected.busy_ns, expected.span_ns, expected.idle)
    assert read_trace(spaced).multiprocessors == MULTIPROCESSORS and read_trace(bare).multiprocessors is None


def test_odd_events_of_other_versions_are_read(tmp_path):
    """A mark of byte order, names in any script, properties that are none."""
    path = tmp_path / "trace.json"
    whole = paced(Fake()).span("user_annotation", "ProfilerStep#\u00b2", 0, 5).launch(400, 405, 410, "\u6838").whole
    expected = read_trace(whole)
    for properties in (None, 5, [1], [{"id": 0, "name": 7, "numSms": "132"}]):
        path.write_text(json.dumps(whole | {"deviceProperties": properties}), "utf-8-sig")
        got = read_trace(path)
        assert (got.busy_ns, got.idle, got.steps[0].number) == (expected.busy_ns, expected.idle, None)
        assert got.multiprocessors is None and got.findings and repr(got)


def test_each_device_has_its_own_trace():
    fake = Fake().launch(0, 5, 10).launch(1, 30, 40)
    fake.launch(2, 100, 190, device=1).launch(3, 200, 300, device=1)
    assert fake.read().device == 1, "the one with most work"
    assert (fake.read(device=0).busy_ns, fake.read(device=1).busy_ns) == (15_000, 190_000)
    assert fake.read(device=0).dropped_kernels == 0, "a kernel of another device is not lost"
    for other in (5, "cuda", "0", [0]):
        with pytest.raises(PerflabError, match=re.escape(f"no work of device {other!r}: it has device 0, 1")):
            fake.read(device=other)


def test_events_that_nobody_knows_are_passed_over():
    fake = paced(Fake())
    expected = fake.read().idle
    fake.span("overhead", "Activity Buffer Request", 0, 500).span("gpu_user_annotation", "forward", 0, 900, 7, 0)
    fake.events.append({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}})
    fake.events.append({"ph": "s", "cat": "ac2g", "id": 1, "pid": 1, "tid": 0, "ts": 3})
    fake.events.append({"ph": "X", "cat": "python_function", "name": "torch/nn/modules/module.py(1): f", "pid": 77,
                        "tid": MAIN, "ts": 1, "dur": 2, "args": None})  # fmt: skip
    fake.events.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x",
                        "ts": 0, "dur": 9, "args": {"Op count": 0}})  # fmt: skip
    assert fake.read().idle == expected


def test_kernels_without_a_grid_and_arguments_are_read():
    """Other profilers write fewer arguments; the process of a device's event is then its number."""
    trace = read_trace(
        [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": t, "dur": 2} for t in (1, 5, 9)]
    )
    assert trace.busy_ns == 6000 and trace.device == 0 and trace.small_share == 0


# -- a profiler of torch


def profiled(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    return profiler


def test_a_profile_without_a_device_says_so_and_how_to_go_on():
    profiler = profiled(lambda: torch.ones(8) + 1)
    with pytest.raises(PerflabError, match=r"0 kernels recorded.*ProfilerActivity.CUDA.*key_averages"):
        read_trace(profiler)
    with pytest.raises(PerflabError, match="already"):
        read_trace(profiler)


def test_a_profiler_that_could_not_write_says_so():
    class Full:
        def export_chrome_trace(self, path):
            """As torch on a full disk: a line in a log, and no file."""

    with pytest.raises(PerflabError, match="make room"):
        read_trace(Full())


def test_frames_of_libraries_are_not_the_users():
    assert own_frame("train.py(12): step") == "train.py(12): step"
    assert own_frame("/tmp/ipykernel_7/123.py(3): step") == "123.py(3): step"
    for name in (
        "torch/nn/modules/module.py(1773): _wrapped_call_impl",
        "typing.py(359): inner",
        "/usr/lib/python3.12/site-packages/lightning/loop.py(3): run",
        "<built-in method item of Tensor object at 0x7f00>",
        "<frozen runpy>(1): run",
        "nn.Module: Linear_0",
    ):
        assert own_frame(name) is None, name


# -- the planted loops


@pytest.mark.parametrize("name", [n for n in planted.FAULTS | planted.HEALTHY if n not in ("prefetching", "graphed")])
def test_each_planted_loop_runs_and_its_small_trace_names_no_machine(name, tmp_path):
    plan = (planted.FAULTS | planted.HEALTHY)[name]
    whole = json.loads(exported(planted.record(plan, "cpu", steps=2)))
    small = trimmed(whole)
    size = write(small, tmp_path / "t.json.gz")
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert size == (tmp_path / "t.json.gz").stat().st_size
    assert str(Path.home()) not in text and str(paths.COURSE) not in text and "site-packages" not in text
    steps = [e for e in small["traceEvents"] if e["name"].startswith("ProfilerStep")]
    assert len(steps) == 2 and min(e["ts"] for e in small["traceEvents"]) == 0
    assert len(recorded(small).operators) > 1
    if plan.stack:
        assert any(e["cat"] == "python_function" and "loops.py(" in e["name"] for e in small["traceEvents"])


def test_what_needs_a_device_says_so():
    for name in ("prefetching", "graphed"):
        with pytest.raises(PerflabError, match="CUDA"):
            next(planted.HEALTHY[name].loop("cpu"))


def test_trimming_changes_nothing_that_is_read():
    """Times of day near the end of a float's digits: not a nanosecond is lost."""
    pick, fake = random.Random(7), paced(Fake()).copy(400, 420, 405, 425, wait=(421, 428)).item(500, 520, 525)
    fake.span("user_annotation", "ProfilerStep#1", -10, 600).span(
        "python_function", "/home/me/train.py(3): f", 399, 600
    )
    for event in fake.events:
        event["ts"] = (5_141_794_360_879_939 + round(1000 * event["ts"]) + pick.randrange(500)) / 1000
    whole, small = fake.read(), read_trace(json.loads(json.dumps(trimmed(fake.whole))))
    assert (small.busy_ns, small.span_ns, small.idle) == (whole.busy_ns, whole.span_ns, whole.idle)
    assert small.top().equals(whole.top()) and small.gaps == whole.gaps
    assert "/home/me" not in json.dumps(trimmed(fake.whole))


# -- recorded traces

RECORDED = sorted(TRACES.glob("*.json.gz"))


@pytest.mark.skipif(not RECORDED, reason="no recorded traces yet")
def test_the_recorded_traces_are_small_and_name_no_machine():
    assert sum(p.stat().st_size for p in RECORDED) < 2_000_000 and len(RECORDED) >= 3
    for path in RECORDED:
        text = gzip.decompress(path.read_bytes()).decode()
        assert not re.search(r'"/|/tmp/|/home/|/root/|host_name', text), path.name
        assert path.name.removesuffix(".json.gz") in planted.FAULTS | planted.HEALTHY


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name.partition(".")[0])
def test_the_busy_share_of_a_recorded_trace_is_that_of_a_sweep_line(path):
    whole = json.loads(gzip.decompress(path.read_bytes()))
    intervals = nanoseconds(whole)
    span = max(e for _, e in intervals) - min(s for s, _ in intervals)
    trace = read_trace(path)
    assert abs(trace.busy_share - swept(intervals) / span) < 1e-3
    assert trace.dropped_kernels == 0 and trace.kernels > 20
    adds_up(trace)


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name.partition(".")[0])
def test_a_planted_fault_is_named_with_its_place_and_a_healthy_loop_is_not(path):
    found, plan = read_trace(path).findings, (planted.FAULTS | planted.HEALTHY)[path.name.partition(".")[0]]
    if not plan.fault:
        assert not found
    else:
        first = found[-1 if plan.fault == faults.MEMORY else 0]  # memory is not a share of time, and comes last
        assert first.name == plan.fault and plan.place in str(first.where), found
        assert first.sentence.startswith(plan.fault) and first.share > 0.01
