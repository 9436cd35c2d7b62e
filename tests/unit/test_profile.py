"""Profiling a loop, the lines at which the host waits, the step in which memory peaks, and the exercises on them."""

import functools
import gzip
import inspect
import json
import math
import os
import threading
import warnings

import nbformat
import numpy as np
import pytest
import torch
from torch import nn

from perflab import PerflabError, paths, question, read_trace
from perflab.bench import timing
from perflab.bench.code import caller
from perflab.launch import dispatch, waits
from perflab.memory import peak
from perflab.trace import exercises, explorer, profile

THIS = os.path.abspath(__file__)


def line_of(function, text: str) -> int:
    """The line of this file in which `text` stands inside of `function`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


# -- where the host waits


def model_and_optimizer(device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    return model, torch.optim.Adam(model.parameters(), **options)


def one_line_each(x):
    x.sum().item()
    x[x > 0]
    torch.nonzero(x)
    x.cpu()
    x.tolist()
    repr(x)
    bool(x.sum() > 0)
    torch.unique(x)
    torch.masked_select(x, x > 0)
    f"{x.sum():.3f}"
    f"{x}"
    x.numpy()
    np.asarray(x)
    torch.allclose(x, x)
    [0, 1, 2, 3][x.argmax()]
    torch.argwhere(x)
    torch.nonzero(x, as_tuple=True)
    torch.unique_consecutive(x, dim=0)
    assert 9.0 not in x


@pytest.mark.parametrize("inference", [False, True])
def test_each_kind_of_wait_is_found_at_its_own_line(inference):
    lines, first = inspect.getsourcelines(one_line_each)
    with torch.inference_mode(inference):
        found = waits.host_syncs(lambda: one_line_each(torch.rand(4)))
    assert [s.place.line for s in found] == [first + k for k in range(1, len(lines))]
    assert {s.place.file for s in found} == {THIS} and all(s.count == 1 for s in found)
    assert [s.place.code for s in found] == [line.strip() for line in lines[1:]]


def no_line(x):
    x[x > 0] = 0.0
    x.masked_fill(x > 0, 1.0)
    torch.where(x > 0, x, -x)
    x.to(torch.float64)
    x.argmax(0)
    torch.repeat_interleave(x, 2)
    nn.functional.one_hot(x.argmax(0), 4)


@pytest.mark.parametrize("inference", [False, True])
def test_what_waits_for_nothing_is_not_named(inference):
    with torch.inference_mode(inference):
        assert waits.host_syncs(lambda: no_line(torch.randn(4, 4))) == []


@pytest.mark.parametrize("foreach", [False, True])
def test_neither_the_optimizers_own_counter_nor_clipping_is_a_wait(foreach, each_device):
    model, optimizer = model_and_optimizer(each_device, foreach=foreach)

    def step():
        model(torch.randn(4, 8, device=each_device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    assert waits.host_syncs(step) == []


def test_waits_of_one_line_are_counted_and_named():
    x = torch.randn(4)

    def step():
        return [x[k].item() + len(x[x > 0]) for k in range(3)]

    (found,) = waits.host_syncs(step)
    assert found.count == 6 and found.operator == "aten._local_scalar_dense"
    assert found.names == ("aten._local_scalar_dense", "aten.index")
    assert str(found).startswith(f"test_profile.py, line {found.place.line}: return [x[k].item()")


def test_what_was_copied_to_the_host_once_waits_no_more():
    def step(x):
        here = x.cpu()
        return here.max().item(), here[0].tolist(), (here * 2).numpy(), [float(v) for v in here[0]], x.sum().item()

    assert [s.count for s in waits.host_syncs(lambda: step(torch.ones(4, 4)))] == [1, 1]


def through(function):
    @functools.wraps(function)
    def around():
        return function()

    return around


class Checked(nn.Module):
    def forward(self, x):
        assert x.sum() > -1e9
        return x


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (through(lambda: torch.ones(3).sum().item()), 1),
        (lambda: [v.item() for v in torch.ones(3)], 3),
        (lambda: list(map(float, torch.ones(3))), 3),
        (lambda: sorted(range(3), key=lambda k: torch.ones(3)[k].item()), 3),
    ],
    ids=["decorated", "comprehension", "called from C", "key of a sort"],
)
def test_the_line_is_right_wherever_the_function_stands(step, count):
    (found,) = waits.host_syncs(step)
    assert found.count == count and found.place.file == THIS and "torch.ones(3)" in found.place.code


def test_the_line_of_a_modules_forward_is_its_own():
    (found,) = waits.host_syncs(lambda: nn.Sequential(nn.Linear(3, 3), Checked())(torch.ones(1, 3)))
    assert found.place.line == line_of(Checked.forward, "assert")


def test_a_wait_inside_of_a_library_is_the_line_that_called_it():
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    found = waits.host_syncs(step)
    assert found and {s.place.line for s in found} <= {line_of(step, "scaler.step("), line_of(step, "scaler.update(")}


def test_a_wait_in_a_backward_is_found(each_device):
    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad.sum().item()
            return grad

    x = torch.ones(3, requires_grad=True, device=each_device)
    (found,) = waits.host_syncs(lambda: Peeks.apply(x).sum().backward())
    assert found.place.line == line_of(Peeks.backward, "grad.sum().item()")


def test_a_notebooks_cell_is_called_cell():
    scope: dict = {"torch": torch}
    exec(compile("def step():\n    torch.ones(1).item()", "/tmp/ipykernel_12/345.py", "exec"), scope)
    (found,) = waits.host_syncs(scope["step"])
    assert str(found.place) == "cell, line 2"


def test_without_a_frame_of_ones_own_another_thread_is_looked_at():
    seen = []
    bare = threading.Thread(target=lambda thread: seen.append(caller(thread)), args=(threading.get_ident(),))
    bare.start()
    bare.join()
    assert seen[0].file == THIS and seen[0].line > 0


def test_all_is_as_it_was_after_a_step_that_raises():
    before = torch.cuda.synchronize, torch.autograd.backward, torch.autograd.grad
    calls = []

    def step():
        calls.append(torch.ones(1).item())
        if len(calls) == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        waits.host_syncs(step)
    with pytest.raises(KeyError, match="mine"):
        calls.clear()
        peak.peak_step(step, 2)
    assert before == (torch.cuda.synchronize, torch.autograd.backward, torch.autograd.grad)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("look", [waits.host_syncs, peak.peak_step, profile.profiled, dispatch.dispatched])
def test_what_a_step_returned_in_place_of_the_step_is_one_sentence(look):
    with pytest.raises(PerflabError, match=r"type Tensor: write lambda: step\(batch\)"):
        look(torch.ones(3))


# -- where memory peaks


def training(batches, width=64, depth=4):
    """A step that takes its batch sizes from `batches`; AdamW's state comes with its first step."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer, sizes = torch.optim.AdamW(model.parameters()), iter(batches)

    def step():
        loss = model(torch.randn(next(sizes), width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


@pytest.mark.parametrize("at", [1, 2, 4])
def test_the_step_with_the_large_batch_is_where_memory_peaks(at):
    sizes = [64] * 4
    sizes[at - 1] = 4096
    _, _, step = training(sizes)
    found = peak.peak_step(step, 4, device="cpu")
    assert (found.step, found.phase) == (at, "backward")
    largest = 4096 * 64 * 4
    assert found.alive[0].line == line_of(training, "loss = model(") and found.alive[0].bytes >= 4 * largest


def test_the_peak_is_the_memory_trackers_of_torch_to_the_byte():
    from torch.distributed._tools.mem_tracker import MemTracker

    model, optimizer, step = training([512] * 3)
    step()  # so that the optimizer's state is there for both
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peak.peak_step(step, 1, device="cpu").bytes == theirs


def test_with_a_small_batch_memory_peaks_in_the_optimizer():
    _, _, step = training([1] * 2, width=256)
    found = peak.peak_step(step, 2, device="cpu")
    assert found.phase == "optimizer"
    assert set(found.phases) == {(s, p) for s in (1, 2) for p in ("forward", "backward", "optimizer")}
    assert found.phases[2, "forward"] > found.phases[1, "forward"], "the optimizer's state is kept"


def test_a_second_forward_of_a_step_is_forward_and_what_comes_after_a_backward_the_rest():
    model = nn.Linear(64, 64)

    def step():
        for rows in (8, 512):
            model(torch.randn(rows, 64)).sum().backward()
        torch.zeros(4096).sum()

    found = peak.peak_step(step, 1, device="cpu")
    assert found.phases[1, "forward"] > 512 * 64 * 4
    assert 0 < found.phases[1, "rest"] < found.phases[1, "forward"] + 4096 * 4


def test_what_is_alive_at_the_peak_adds_up_to_it():
    _, _, step = training([256, 512])
    found = peak.peak_step(step, 2, device="cpu")
    assert sum(a.bytes for a in found.alive) == found.bytes
    parameters = next(a for a in found.alive if a.phase == "parameters and inputs")
    assert 0 <= parameters.bytes - 4 * (64 * 64 + 64) * 4 <= 64, "with AdamW's counters, which no operator makes"
    assert found.table().loc[2, "backward"] == found.bytes


def test_a_batch_that_is_made_by_nobody_here_counts_only_while_it_is_alive():
    data = [bytearray(64 * 1024) for _ in range(3)]
    left = iter(data)

    def step():
        return torch.frombuffer(next(left), dtype=torch.float32).sum()

    assert peak.peak_step(step, 3, device="cpu").bytes < 2 * 64 * 1024


@pytest.mark.parametrize(
    ("steps", "device", "why"), [(2, "cpu", "no peak"), (0, None, "steps=0"), (1, "gpu", "device='gpu'")]
)
def test_what_has_no_peak_is_one_sentence(steps, device, why):
    with pytest.raises(PerflabError, match=why):
        peak.peak_step(lambda: None, steps, device=device)


def test_the_peak_is_a_hand_count_of_bytes():
    def step():
        a = torch.zeros(1000)
        b = a.view(10, 100)[0]  # keeps all of a
        a = torch.zeros(500)
        del b, a
        return [torch.zeros(300) for _ in range(3)]

    assert peak.peak_step(step, 2, device="cpu").bytes == 4 * (1000 + 500)


# -- the profiler


def products(n=6):
    a = torch.randn(64, 64)
    for _ in range(n):
        a = torch.relu(a @ a)


@pytest.fixture(scope="module")
def seen():
    return profile.profiled(products, steps=4, warmup=2)


def test_the_steps_asked_for_are_recorded_and_their_operators_counted(seen):
    assert seen.recorded == 4
    rows = seen.table(100).set_index("operator")
    assert rows.loc["aten::mm", "calls"] == rows.loc["aten::relu", "calls"] == 4 * 6
    assert not any(name.startswith("ProfilerStep") or ".py(" in name for name in rows.index)


def test_self_times_add_up_and_totals_count_parents_twice(seen):
    rows = seen.table(100).set_index("operator")
    assert rows["share"].sum() == pytest.approx(1)
    assert list(rows["self_host_s"]) == sorted(rows["self_host_s"], reverse=True)
    assert rows.loc["aten::matmul", "total_host_s"] >= rows.loc["aten::mm", "total_host_s"]
    assert rows["total_host_s"].sum() > 1.2 * rows["self_host_s"].sum()


def test_the_step_runs_as_often_as_is_said():
    calls = []
    profile.profiled(lambda: calls.append(torch.ones(2) + 1), steps=3, warmup=2)
    assert len(calls) == 2 * 2 + 3 * 3


def test_a_loop_that_the_profiler_slows_is_refused_in_words(seen):
    made = {"steps": 5, "recorded": 5, "operators": (), "packed": b""}
    slowed = profile.Profiled(plain_s=(0.9, 1.1), profiled_s=1.9, **made)
    assert slowed.distortion == pytest.approx(1.9)
    assert "slows this loop x1.9" in slowed.warning and "not gaps" in slowed.warning
    assert profile.Profiled(plain_s=(1.0, 1.0), profiled_s=1.1, **made).warning == ""
    assert "quieter machine" in profile.Profiled(plain_s=(1.0, 1.4), profiled_s=1.2, **made).warning
    assert "x" in str(slowed) and not any(c.isdigit() for c in repr(slowed).partition("; ")[2])


def test_memory_is_recorded_where_it_is_asked_for(seen):
    def allocations(profiled):
        events = json.loads(gzip.decompress(profiled.packed))["traceEvents"]
        return sum(e.get("name") == "[memory]" for e in events)

    assert allocations(seen) == 0
    assert allocations(profile.profiled(products, steps=1, warmup=1, memory=True)) >= 12


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_an_exported_trace_is_torchs_own_without_the_computers_name(seen, tmp_path, name):
    said = seen.export(tmp_path / name)
    assert name in said and "ui.perfetto.dev" in said and "sends nothing" in said
    raw = (tmp_path / name).read_bytes()
    whole = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    theirs = json.loads(gzip.decompress(seen.packed))
    assert whole["traceEvents"] == theirs["traceEvents"]
    assert "host_name" not in whole and str(tmp_path) not in json.dumps(whole)


def test_a_place_that_will_not_do_is_one_sentence(seen, tmp_path):
    seen.export(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    long, nobody = f"{'a' * 300}.json", "~nobody-here/b.json"
    places_ = [("a.json", "not overwritten"), ("b.txt", "something.json"), ("none/b.json", "does not exist")]
    for path, word in [*places_, (long, "too long"), (nobody, "does not exist|no path"), ("b\0.json", "null")]:
        with pytest.raises(PerflabError, match=word):
            seen.export(tmp_path / path)
    assert (tmp_path / "a.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("bad", [{"steps": 0}, {"steps": 2.5}, {"steps": 10**9}, {"warmup": 0}, {"warmup": True}])
def test_counts_that_are_none_are_one_sentence(bad):
    with pytest.raises(PerflabError, match="whole number"):
        profile.profiled(products, **bad)


def test_a_profiler_around_or_inside_is_one_sentence_and_the_outer_one_goes_on():
    def starts_another():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            products()

    with pytest.raises(PerflabError, match="profiler of its own"):
        profile.profiled(starts_another)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as outer:
        with pytest.raises(PerflabError, match="already running"):
            profile.profiled(products)
        products(3)
    assert next(e.count for e in outer.key_averages() if e.key == "aten::mm") == 3


@pytest.mark.parametrize("call", [1, 4, 7, 9])
def test_an_interrupt_stops_the_profiler_and_leaves_no_file(call, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    calls = []

    def step():
        calls.append(products())
        if len(calls) == call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile.profiled(step, steps=2, warmup=2)
    assert not torch._C._autograd._profiler_enabled() and list(tmp_path.iterdir()) == []
    calls.clear()
    assert profile.profiled(products, steps=2, warmup=1).recorded == 2


def test_python_frames_are_no_operators():
    """torch 2.12 and 2.13 list them as operators when stacks are recorded."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True) as seen:
        products()
    names = {row["operator"] for row in profile._operators(seen)}
    assert "aten::mm" in names and not any("py(" in name or name.startswith("<") for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_device_there_is_no_busy_time_and_no_trace(seen, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(timing.busy(products))
    assert capfd.readouterr() == ("", "") and os.environ["KINETO_LOG_LEVEL"] == "99"
    with pytest.raises(PerflabError, match="0 kernels recorded"):
        seen.trace  # noqa: B018


# -- an allocator, played


class Allocator:
    """Stands for torch.cuda's: what is allocated, its highest since the last reset, and its history."""

    def __init__(self, monkeypatch, before: int = 0):
        self.now = self.high = before
        self.count, self.sizes, self.events, self.recording = 0, {}, [], []
        cuda = torch.cuda
        monkeypatch.setattr(peak.machine, "missing", lambda need: None)
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "memory_allocated", lambda: self.now)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda: self.high)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(cuda, "memory_stats", lambda: {"allocation.all.allocated": self.count})
        monkeypatch.setattr(cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(cuda.memory, "_snapshot", lambda: {"device_traces": [self.events]})

    def reset(self):
        self.high = self.now

    def record(self, enabled="all", **options):
        self.recording.append(enabled)

    def take(self, size: int, line: int = 0) -> int:
        self.count += 1
        self.now += size
        self.high = max(self.high, self.now)
        self.sizes[self.count] = size
        frames = [{"filename": torch.__file__, "line": 1, "name": "x"}, {"filename": THIS, "line": line, "name": "y"}]
        kept = frames if line else []
        self.events.append({"action": "alloc", "addr": self.count, "size": size, "frames": kept})
        return self.count

    def give(self, address: int):
        self.now -= self.sizes[address]
        for action in ("free_requested", "free_completed"):
            self.events.append({"action": action, "addr": address, "size": self.sizes[address], "frames": []})


class Grows(torch.autograd.Function):
    """Takes memory of the played allocator on its way back."""

    @staticmethod
    def forward(ctx, x, allocator, size):
        ctx.asked = allocator, size
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        allocator, size = ctx.asked
        allocator.give(allocator.take(size))
        return grad, None, None


def on_allocator(allocator, sizes):
    """A step that takes 100 in forward, what `sizes` says in backward, and 300 in all for its optimizer, once."""
    weight = torch.ones(3, requires_grad=True)
    optimizer, left, state = torch.optim.SGD([weight]), iter(sizes), []
    optimizer.register_step_post_hook(lambda *_: state or state.append(allocator.take(300, line=7)))

    def step():
        x = allocator.take(100, line=5)
        Grows.apply(weight, allocator, next(left)).sum().backward()
        allocator.give(x)
        optimizer.step()

    return step


def test_the_allocators_peak_is_told_by_step_and_phase_with_what_is_alive(monkeypatch):
    allocator = Allocator(monkeypatch, before=50)
    found = peak.peak_step(on_allocator(allocator, [10, 900, 10]), 3, device="cuda")
    assert (found.step, found.phase, found.bytes, found.counted) == (2, "backward", 50 + 300 + 100 + 900, "allocator")
    assert found.phases[1, "forward"] == 50 + 100 and found.phases[1, "backward"] == 50 + 100 + 10
    assert found.phases[3, "forward"] == 50 + 300 + 100
    alive = {(a.phase, a.line): a.bytes for a in found.alive}
    assert alive == {
        ("backward", 0): 900,
        ("optimizer", 7): 300,
        ("forward", 5): 100,
        ("parameters and inputs", 0): 50,
    }


def test_the_allocators_history_is_switched_off_whatever_happens(monkeypatch):
    allocator = Allocator(monkeypatch)
    with pytest.raises(StopIteration):
        peak.peak_step(on_allocator(allocator, [10]), 2, device="cuda")
    assert allocator.recording == ["all", None]


def test_a_step_that_leaves_the_device_alone_has_no_peak_there(monkeypatch):
    Allocator(monkeypatch)
    with pytest.raises(PerflabError, match="allocated nothing on the device"):
        peak.peak_step(lambda: torch.ones(3) + 1, 2, device="cuda")


# -- the notebook, its explorer and its exercises


@pytest.fixture(scope="module")
def recorded():
    names = ("tiny_kernels", "slow_loader", "matmuls")
    return {name: read_trace(paths.DATA / "traces" / f"{name}.json.gz") for name in names}


def taught(*names: str) -> dict:
    """What the cells of the notebook that define these functions define, after its imports."""
    nb = nbformat.read(paths.NOTEBOOKS / "06_profiler.ipynb", 4)
    cells = [c.source for c in nb.cells if c.cell_type == "code"]
    scope: dict = {}
    for source in cells[:2]:
        exec(source, scope)
    for name in names:
        source = next(c for c in cells[2:] if f"def {name}(" in c)
        exec(source[source.index(f"def {name}(") :].partition("\n\n\n")[0], scope)
    return scope


def test_the_six_lines_of_the_notebook_give_the_busy_share(recorded):
    busy_share = taught("busy_share")["busy_share"]
    for t in recorded.values():
        assert float(busy_share(t.events)) == pytest.approx(t.busy_share, abs=1e-9)


def test_a_trace_without_its_gaps_has_the_same_table_and_a_busy_device(recorded):
    squeezed = taught("squeezed")["squeezed"]("tiny_kernels")
    assert recorded["tiny_kernels"].busy_share < 0.5 < 0.99 < squeezed.busy_share
    columns = ["calls", "time_s"]
    assert squeezed.top(1000)[columns].equals(recorded["tiny_kernels"].top(1000)[columns])


def test_the_window_says_what_is_in_it(recorded):
    for t in recorded.values():
        view = explorer.TraceView(t)
        assert view.busy_share(0, t.span_s) == pytest.approx(t.busy_share, abs=1e-6)
        assert view.idle(0, t.span_s) == pytest.approx(t.idle, abs=1e-6)


def test_an_explorer_of_no_trace_says_so():
    with pytest.raises(PerflabError, match="at least one trace"):
        explorer.explore_trace({})


def test_the_exercise_names_the_faults_that_were_planted():
    q, right = question("06.1"), exercises.PLANTED
    assert q.check(right).state == "Correct"
    assert q.check({letter: f" {name.upper()} " for letter, name in right.items()}).state == "Correct"
    for letter, trace_ in exercises.unnamed().items():
        assert right[letter] in [f.name for f in trace_.findings], "the answer is what the reader finds too"
        for name in exercises.NAMES:
            if name != right[letter]:
                outcome = q.check(right | {letter: name})
                assert (
                    outcome.state == "Not right" and f"{letter} " in outcome.sentence and "2 of 3" in outcome.sentence
                )


@pytest.mark.parametrize("answer", [3, {}, {"A": "x", "B": "y"}, {"A": "noise", "B": "host work", "C": "synchronise"}])
def test_an_answer_of_another_form_hears_which(answer):
    outcome = question("06.1").check(answer)
    assert outcome.state == "Not right" and ("dict" in outcome.sentence or "none of the names" in outcome.sentence)


def solution(*changes: tuple[str, str]):
    source = question("06.2").problem.solution
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    scope: dict = {}
    exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"), scope)
    return scope["trained"]


def test_a_loop_that_waits_once_is_right():
    assert question("06.2").check(solution()).state == "Correct"


@pytest.mark.parametrize("end", [".cpu().tolist()", ".cpu().numpy().tolist()", ".double().cpu().clone().tolist()"])
def test_what_was_copied_to_the_host_waits_no_more(end):
    before = torch.random.get_rng_state()
    assert question("06.2").check(solution((".tolist()", end))).state == "Correct"
    assert torch.equal(before, torch.random.get_rng_state()), "the check leaves the learner's random numbers alone"


STACKED = [("torch.stack(losses).tolist()", "losses"), ("import torch", "import ctypes, torch")]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ([("loss.detach())", "loss.item())"), ("torch.stack(losses).tolist()", "losses")], "cell, line 10 alone 12"),
        ([("optimizer.step()", "pass")], "not the losses"),
        ([("torch.stack(losses).tolist()", "torch.stack(losses).tolist()[1:]")], "you return 11"),
        ([("torch.stack(losses).tolist()", "losses")], "Python numbers"),
        ([("loss.detach()", "memoryview(loss.detach().numpy())[()]"), *STACKED], "wait 12 times"),
        ([("loss.detach()", "ctypes.c_float.from_address(loss.data_ptr()).value"), *STACKED], "no wait was seen"),
        (
            [("    losses = []", "    from copy import deepcopy\n    model, losses = deepcopy(model), []")],
            "not the losses",
        ),
    ],
    ids=["item", "no training", "one is missing", "tensors", "numpy", "addresses", "another model"],
)
def test_a_wrong_loop_hears_what_is_wrong(changes, word):
    outcome = question("06.2").check(solution(*changes))
    assert outcome.state == "Not right" and word in outcome.sentence
