"""Launching operators: the chain, who chooses, the model of host and device, the levels, the exercises."""

import contextlib
import itertools
import math
import subprocess
import sys
import time
import types

import nbformat
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perflab import PerflabError, paths, question
from perflab.bench import machine
from perflab.bench.result import Result
from perflab.launch import dispatch, hierarchy, timeline
from perflab.launch import exercises as problems

pytestmark = pytest.mark.usefixtures("one_thread")

# -- the chain


@pytest.mark.parametrize(("ops", "n"), [(1, 1), (3, 5), (198, 64)])
def test_a_chain_is_add_relu_mul_over_and_over(ops, n):
    call, (x, y) = dispatch.chain(ops, n)
    expected, other = x.tolist(), y.tolist()
    for k in range(ops):
        step = (lambda a, b: a + b, lambda a, b: max(a, 0.0), lambda a, b: a * b)[k % 3]
        expected = [step(a, b) for a, b in zip(expected, other, strict=True)]
    assert call(x, y).tolist() == pytest.approx(expected, rel=1e-5)
    assert x.shape == y.shape == (n,) and x.dtype == torch.float32


def test_a_chain_of_198_dispatches_66_of_each_and_stays_near_one():
    call, inputs = dispatch.chain(198, 4096)
    names = dispatch.dispatched(lambda: call(*inputs))
    assert {name: names.count(name) for name in set(names)} == {
        "aten.add.Tensor": 66,
        "aten.relu.default": 66,
        "aten.mul.Tensor": 66,
    }
    out = call(*inputs)
    assert torch.isfinite(out).all() and 0.01 < out.mean() < 10 and out.std() > 0


def test_a_chain_has_the_same_numbers_each_time_it_is_built():
    (_, a), (_, b) = dispatch.chain(3, 100), dispatch.chain(3, 100)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- who chooses


def test_a_matrix_product_is_one_operator_for_the_dispatcher():
    a, b = torch.rand(4, 8), torch.rand(8, 2)
    with FlopCounterMode(display=False) as flops:
        names = dispatch.dispatched(lambda: a @ b)
    assert names == ["aten.mm.default"]
    assert list(map(str, flops.get_flop_counts()["Global"])) == ["aten.mm"]  # torch's own counter saw the same one


def test_keys_follow_device_layout_and_mode_and_neither_dtype_nor_shape():
    x = torch.rand(8, 8)
    same = [x.double(), x.bfloat16(), x[:2], x.t(), torch.rand(3, 3, 3)]
    assert {dispatch.keys(x) for x in same} == {dispatch.keys(x)} and "CPU" in dispatch.keys(x)
    with torch.inference_mode():
        inference = torch.rand(8, 8)
    others = [x.to("meta"), x.to_sparse(), inference]
    assert all(dispatch.keys(o) != dispatch.keys(x) for o in others)


@pytest.mark.parametrize(
    ("kernel", "whose"),
    [  # as profilers print them on Ampere and Hopper
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>", "PyTorch"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>", "PyTorch"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "cuBLAS"),
        ("ampere_sgemm_128x64_nn", "cuBLAS"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", "cuBLAS"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(...)", "cuBLAS"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>", "cuBLAS"),
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128", "cuDNN"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false>", "cuDNN"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized>", "cuDNN"),
        ("triton_poi_fused_add_mul_relu_0", "Triton"),
        ("my_own_kernel(float*)", "unknown"),
    ],
)
def test_a_kernel_is_told_by_its_name(kernel, whose):
    assert dispatch.family(kernel) == whose


@pytest.mark.skipif(machine.cuda_devices() > 0, reason="this machine has CUDA")
@pytest.mark.parametrize("ask", [dispatch.kernels, dispatch.submitted])
def test_kernels_need_a_device(ask):
    with pytest.raises(PerflabError, match="no CUDA device here"):
        ask(lambda: torch.ones(3) + 1)


def test_the_hosts_share_is_reported_and_the_device_is_waited_for_before(monkeypatch):
    order = []
    monkeypatch.setattr(dispatch.timing, "synchronize", lambda: order.append("synchronize"))
    seen = dispatch.issued(lambda: order.append("call"))
    assert order == ["synchronize", "call"] and 0 <= seen["host_s"] < 1


def test_a_row_is_timed_by_the_host_and_its_kernels_by_the_profiler(monkeypatch):
    calls = []
    monkeypatch.setattr(dispatch.timing, "busy", lambda call: (call(), 0.25)[1])
    seen = dispatch.worked(lambda: calls.append(1), times=3)
    assert seen["busy_s"] == 0.25 and len(calls) == 7
    assert len(seen["wall_s"]) == len(seen["host_s"]) == 3 and all(0 <= x < 1 for x in seen["wall_s"] + seen["host_s"])


# -- the model


def test_the_sources_example_is_idle_for_exactly_eighty_percent():
    line = timeline.predicted(200, 2e-6, 10e-6)
    assert line.busy_share == pytest.approx(0.2, abs=1e-12) and line.span_s == pytest.approx(2.002e-3)
    waiting = timeline.predicted(200, 2e-6, 10e-6, synchronous=True)
    assert waiting.idle_share == pytest.approx(5 / 6) and waiting.span_s == pytest.approx(2.4e-3)
    rows = timeline.rows(200, 2e-6, 10e-6)
    assert [rows[name]["idle_percent"] for name in ("asynchronous", "synchronous")] == [80.0, 83.3]


def simulated(ops, kernel_ns, launch_ns, synchronous):
    """Another way to the same line: nanosecond by nanosecond, a queue between two workers."""
    queued = launched = done = busy = now = 0
    left_host, left_device, waits = launch_ns, 0, False
    while done < ops:
        now += 1
        if launched < ops and not waits:
            left_host -= 1
            if left_host == 0:
                launched, queued, left_host, waits = launched + 1, queued + 1, launch_ns, synchronous
                started_now = True
            else:
                started_now = False
        else:
            started_now = False
        if left_device:
            left_device -= 1
            busy += 1
            if left_device == 0:
                done, waits = done + 1, False
        if not left_device and queued:
            queued, left_device = queued - 1, kernel_ns
        assert not (started_now and launched > ops)
    return now, busy


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(("kernel_ns", "launch_ns"), [(2, 10), (10, 2), (7, 7), (1, 3)])
def test_the_time_line_is_what_a_simulation_of_two_workers_gives(kernel_ns, launch_ns, synchronous):
    line = timeline.predicted(40, kernel_ns * 1e-9, launch_ns * 1e-9, synchronous)
    span, busy = simulated(40, kernel_ns, launch_ns, synchronous)
    assert line.span_s * 1e9 == pytest.approx(span) and busy == 40 * kernel_ns
    assert line.busy_share == pytest.approx(busy / span, abs=0.04)  # the two ends of the row are left out of it


@pytest.mark.parametrize("synchronous", [False, True])
def test_one_thing_at_a_time_and_no_kernel_before_its_launch(synchronous):
    spans = timeline.predicted(50, 3e-6, 5e-6, synchronous).spans
    for lane in ("host", "device"):
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(s for s in spans if s.lane == lane))
    launches, kernels = ([s for s in spans if s.kind == kind] for kind in ("launch", "kernel"))
    assert len(launches) == len(kernels) == 50
    assert all(launch.end <= kernel.start for launch, kernel in zip(launches, kernels, strict=True))


def busy_result(source="here") -> Result:
    rounds = {v: [(r, [x * (1 + r)]) for r in range(8)] for v, x in {"small": 0.2, "large": 0.9}.items()}
    walls = {v: [(r, [1.0 * (1 + r)]) for r in range(8)] for v in rounds}
    facts = machine.facts()
    return Result("t", 1, "size", list(rounds), {"busy_s": rounds, "wall_s": walls}, machine=facts, source=source)


def test_the_explorer_draws_at_both_ends_and_takes_over_a_measured_setting():
    points = {"small": timeline.Point.of(busy_result(), "small", 1e-6, 10e-6)}
    points["large"] = timeline.Point.of(busy_result("some-gpu"), "large", 40e-6, 8e-6)
    points["slow"] = timeline.Point.of(busy_result("some-gpu"), "large", 400e-6, 8e-6)
    points["nothing"] = timeline.Point(math.nan, math.nan, math.nan, "here")
    explorer = timeline.explore_launch(points)
    for name, control in explorer.controls.items():
        first = control.value
        for value in getattr(control, "options", None) or (getattr(control, "min", True), getattr(control, "max", 0)):
            control.value = value
            assert explorer.error is None, (name, value)
        control.value = first
    knobs = explorer.controls
    knobs["measured"].value = "small"
    assert (knobs["kernel_us"].value, knobs["launch_us"].value) == (1.0, 10.0)
    assert "Measured here" in explorer.caption.value and "20.0%" in explorer.caption.value
    knobs["measured"].value = "large"
    assert "on some-gpu" in explorer.caption.value and "90.0%" in explorer.caption.value
    assert "show less" not in explorer.caption.value
    knobs["measured"].value = "slow"
    assert "A kernel takes 400 us" in explorer.caption.value and "the sliders show less" in explorer.caption.value
    knobs["measured"].value = "nothing"
    assert "nothing is measured here" in explorer.caption.value


def test_the_explorer_needs_no_measurement():
    explorer = timeline.explore_launch()
    assert explorer.error is None and "model" in explorer.alt and "times as fast" in explorer.caption.value


# -- the levels


def test_the_levels_go_from_the_smallest_to_the_largest(monkeypatch):
    facts = {"threads_a_warp": 32, "threads_a_cta": 1024, "largest_cluster": 8}
    monkeypatch.setattr(hierarchy, "_asked", lambda question: facts)
    rows = hierarchy.levels()
    assert [name.split(" ")[0] for name in rows] == problems.LEVELS
    assert (rows["warp"]["threads"], rows["CTA = thread block"]["threads"]) == (32, 1024)
    assert hierarchy.device_facts()["largest_cluster"] == {"reads": 8}


@pytest.mark.skipif(machine.cuda_devices() > 0, reason="this machine has CUDA")
def test_without_a_device_no_driver_is_asked(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(PerflabError, match="could not be asked: no CUDA device here"):
        hierarchy.levels()


def test_asking_nothing_touches_no_gpu():
    code = "import torch, perflab.launch.dispatch, perflab.launch.hierarchy; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- the notebook's own lines


def code_with(name: str) -> str:
    nb = nbformat.read(paths.NOTEBOOKS / "04_kernel_launch.ipynb", 4)
    return next(c.source for c in nb.cells if c.cell_type == "code" and f"def {name}(" in c.source)


def defined(name: str, **scope) -> dict:
    """What the cell that defines `name` defines, up to where it goes on to measure."""
    body = code_with(name)
    exec(body[: body.index("\n\n\nq1 = ")] if "q1 = " in body else body, scope)
    return scope


def test_the_model_that_is_shown_is_the_one_that_is_checked():
    shown = defined("heads", torch=torch)["heads"]
    for seed in range(3):
        inputs = problems._inputs(seed, "cpu")
        assert torch.equal(shown(*inputs), problems.heads(*inputs))
    assert len(dispatch.dispatched(lambda: shown(*inputs))) == len(dispatch.dispatched(lambda: problems.heads(*inputs)))


class Device:
    """Stands for torch.cuda: keeps the order of what is asked of it; a replay does what was captured again."""

    def __init__(self, monkeypatch, body):
        self.order, self.body, self.stream = [], body, "default"
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: self.named(name))
        monkeypatch.setattr(torch.cuda, "stream", lambda s: self.on("side"))
        monkeypatch.setattr(torch.cuda, "graph", lambda g: self.on("capture"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def named(self, name):
        side = name == "Stream"
        waits = lambda other: self.order.append(f"{'side' if side else 'default'} waits")  # noqa: E731
        return types.SimpleNamespace(wait_stream=waits)

    @contextlib.contextmanager
    def on(self, stream):
        self.stream = stream
        yield
        self.stream = "default"

    def replay(self):
        self.body()


def test_the_capture_that_is_taught_warms_up_aside_copies_in_checks_the_shape_and_clones(monkeypatch):
    static, out = torch.ones(8, 4), torch.empty(8, 4)
    device = Device(monkeypatch, lambda: torch.mul(static, 2, out=out))

    def call(x):
        device.order.append(device.stream)
        assert not torch.is_grad_enabled()
        return torch.mul(x, 2, out=out)

    replay = defined("captured", torch=torch)["captured"](call, static)
    assert device.order == ["side waits", "side", "side", "side", "default waits", "capture"]
    first, second = replay(torch.full((8, 4), 3.0)), replay(torch.full((8, 4), 5.0))
    assert (first == 6).all() and (second == 10).all() and static[0, 0] == 5
    for wrong in ((4,), (1, 4), (4, 4)):
        with pytest.raises(AssertionError, match="captured for"):
            replay(torch.ones(wrong))


# -- exercises


def solved():
    scope: dict = {}
    exec(question("04.1").problem.solution, scope)
    return scope["faster"]


def with_a_wrong(change):
    """The reference solution with another last line."""

    def answer(x, w, b):
        return change(x, w, b, x @ w + b[:, None])

    return answer


class Stale:
    """As a graph whose new inputs were not copied in."""

    def __call__(self, x, w, b):
        self.out = getattr(self, "out", None)
        if self.out is None:
            self.out = solved()(x, w, b)
        return self.out


class Overwriting(Stale):
    """As a graph that returns its static output."""

    def __call__(self, x, w, b):
        fresh = solved()(x, w, b)
        self.out = fresh if getattr(self, "out", None) is None else self.out.copy_(fresh)
        return self.out


class ByAddress:
    """Right on every new tensor, and never again."""

    def __init__(self):
        self.kept = {}

    def __call__(self, x, w, b):
        if x.data_ptr() not in self.kept:
            self.kept[x.data_ptr()] = solved()(x, w, b), x  # kept alive, so that no address comes back
        return self.kept[x.data_ptr()][0]


def slow(x, w, b):
    time.sleep(0.3)
    return solved()(x, w, b)


def in_place(x, w, b):
    out = solved()(x, w, b)
    x.zero_()
    return out


@pytest.mark.timed
@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (7, "function"),
        (lambda x: x, "called with x, w, b"),
        (lambda x, w, b: [1, 2], "list"),
        (lambda x, w, b: x, "(16, 32)"),
        (lambda x, w, b: solved()(x, w, b).bfloat16(), "bfloat16"),
        (in_place, "in place"),
        (with_a_wrong(lambda x, w, b, y: torch.relu(y.sum(0))), "relu belongs"),
        (with_a_wrong(lambda x, w, b, y: torch.relu(x @ w).sum(0)), "bias"),
        (with_a_wrong(lambda x, w, b, y: torch.relu(y).mean(0)), "averaged"),
        (with_a_wrong(lambda x, w, b, y: torch.relu(y[1:]).sum(0)), "differ"),
        (Stale(), "old result"),
        (Overwriting(), "clone"),
        (slow, "a call takes"),
        (lambda x, w, b: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_fast_answer_with_wrong_numbers_hears_what_is_wrong(answer, word):
    outcome = question("04.1").check(answer)
    assert outcome.state == "Not right" and word in outcome.sentence, outcome


def test_an_untouched_answer_is_not_yet():
    assert all(question(f"04.{k}").check(...).state == "Not yet" for k in (1, 2, 3))


@pytest.mark.timed
def test_a_result_that_is_kept_by_its_input_is_found_out(monkeypatch):
    timed_as(monkeypatch, 12.0)
    outcome = question("04.1").check(ByAddress())
    assert outcome.state == "Not right" and "calculate anew" in outcome.sentence


def timed_as(monkeypatch, gain: float, spread: float = 0.01):
    """The check sees `heads` take `gain` times as long as the answer, give or take `spread`."""

    def measured(variable, values, run, **how):
        for call in values.values():
            run(call)
        rounds = {
            "heads": [(r, [gain * (1 + spread * (-1) ** r)]) for r in range(8)],
            "yours": [(r, [1.0]) for r in range(8)],
        }
        return Result("t", 1, variable, list(values), {"time_s": rounds})

    monkeypatch.setattr(problems, "vary", measured)
    monkeypatch.setattr(problems.machine, "device", lambda: "cpu")


@pytest.mark.timed
@pytest.mark.parametrize(
    ("gain", "spread", "state", "word"),
    [
        (12.0, 0.01, "Correct", "12.0 times"),
        (1.6, 0.01, "Not right", "half way"),
        (1.0, 0.01, "Not right", "not faster"),
        (4.0, 0.4, "CANNOT TELL", "quiet"),
    ],
)
def test_right_numbers_are_judged_by_the_clock(monkeypatch, gain, spread, state, word):
    timed_as(monkeypatch, gain, spread)
    outcome = question("04.1").check(solved())
    assert outcome.state == state and word in outcome.sentence
    if state == "Not right":
        inputs = problems._inputs(0, "cpu")
        assert f"calls {len(dispatch.dispatched(lambda: solved()(*inputs)))} operators" in outcome.sentence


@pytest.fixture
def quick(monkeypatch):
    vary = problems.vary
    monkeypatch.setattr(problems, "vary", lambda *a, **how: vary(*a, **how | {"budget_s": 0.7}))


@pytest.mark.timed
def test_the_reference_solution_is_fast_enough_on_this_machine(quick):
    outcome = question("04.1").check(solved())
    assert outcome.state in ("Correct", "CANNOT TELL"), outcome
    left, whole = (
        len(dispatch.dispatched(lambda c=c: c(*problems._inputs(0, "cpu")))) for c in (solved(), problems.heads)
    )
    assert 20 * left < whole


@pytest.mark.timed
def test_the_model_itself_is_right_and_not_faster(quick):
    outcome = question("04.1").check(problems.heads)
    assert outcome.state in ("Not right", "CANNOT TELL"), outcome
    assert "right" in outcome.sentence


def test_the_busy_shares_are_those_of_the_model():
    check = question("04.2").check
    lines = [timeline.predicted(100, kernel_s, launch_s, waits) for kernel_s, launch_s, waits in problems.SETTINGS]
    assert check([100 * line.busy_share for line in lines]).state == "Correct"
    assert check([50, 100, 33]).state == "Correct"


@pytest.mark.parametrize(
    ("id", "answer", "word"),
    [
        ("04.2", 50, "list of three"),
        ("04.2", [50, 100], "list of three"),
        ("04.2", [0.5, 1, 0.333], "percent"),
        ("04.2", [50, 0, 66.7], "idle"),
        ("04.2", [50, 200, 33.3], "more than 100"),
        ("04.2", [33.3, 100, 33.3], "first setting"),
        ("04.2", [50, 66.7, 33.3], "second setting"),
        ("04.2", [33.3, 66.7, 33.3], "first and the second"),
        ("04.2", [50, 100, 50], "third setting"),
        ("04.2", [50, 100, 20], "not all are right"),
        ("04.3", "thread", "list of five"),
        ("04.3", ["thread", "warp"], "once"),
        ("04.3", ["grid", "cluster", "CTA", "warp", "thread"], "largest to the smallest"),
        ("04.3", ["thread", "warp", "cluster", "CTA", "grid"], "not a group"),
        ("04.3", ["thread", "CTA", "warp", "cluster", "grid"], "made of warps"),
        ("04.3", ["warp", "thread", "CTA", "cluster", "grid"], "threads make warps"),
    ],
)
def test_each_slip_is_heard(id, answer, word):
    outcome = question(id).check(answer)
    assert outcome.state == "Not right" and word in outcome.sentence


@pytest.mark.parametrize("id", ["04.2", "04.3"])
def test_the_solution_is_right(id):
    q = question(id)
    assert q.check(eval(q.problem.solution)).state == "Correct"


def test_a_thread_block_is_a_cta():
    assert question("04.3").check(["Thread", "warp", "thread block", "cluster", "grid"]).state == "Correct"
