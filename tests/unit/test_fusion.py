"""torch.compile from outside: kernels, graphs, breaks, guards; and that nothing of it is left behind."""

import builtins
import inspect
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch._dynamo.utils import counters

from perflab import PerflabError
from perflab.bench import cleanup, machine
from perflab.launch import compile

needs_compiler = pytest.mark.skipif(machine.missing("compiler") is not None, reason="no C++ compiler here")


def fused(x, a, b):
    return torch.relu(x + a) * b


def noisy(x):
    h = x @ x
    if h.sum().item() > 0:  # break 1
        h = h + 1
    print("", end="")  # break 2
    return h.relu().sum()


def branching(x):
    if x.sum() > 0:  # break 1
        return x + 1
    return x - 1


def talking(x):
    print("", end="")  # break 1
    return x + 1


def clean(x):
    h = x @ x
    return torch.where(h.sum() > 0, h + 1, h).relu().sum()


def scaled(x, name):
    return x * {"a": 1}.get(name, 2)


def line(function, mark: str) -> int:
    source, first = inspect.getsourcelines(function)
    return next(first + k for k, text in enumerate(source) if text.rstrip().endswith(f"# {mark}"))


def left_over() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).iterdir()}


# -- what is compiled


class Broken(torch.nn.Module):
    """Two graphs, of which the compiler writes a kernel for the second alone."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()  # break 1
        return torch.relu(x) + 1


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A function compiled in a process whose own cache and temporary folder are watched."""
    patch = pytest.MonkeyPatch()
    own = tmp_path_factory.mktemp("own")
    patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    processes = set(cleanup.descendants())
    assert left_over() == set()
    made = compile.compiled(fused, *torch.randn(3, 1000))
    after = {
        "processes": set(cleanup.descendants()) - processes,
        "folders": left_over(),
        "cache": list(own.iterdir()),
        "place": os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own),
    }
    yield made, after, own
    patch.undo()


@needs_compiler
def test_three_operators_become_one_kernel(seen):
    made, _, _ = seen
    x, a, b = torch.randn(3, 1000)
    before = counters["stats"]["unique_graphs"]
    assert torch.equal(made.call(x, a, b), fused(x, a, b))
    assert (made.kernels, made.graphs, made.breaks) == (1, 1, ())
    assert made.compile_s > 0.05
    assert counters["stats"]["unique_graphs"] == before > 0, "what was compiled before stays compiled"


@needs_compiler
def test_nothing_is_left_by_compiling(seen):
    assert seen[1] == {"processes": set(), "folders": set(), "cache": [], "place": True}


@needs_compiler
@pytest.mark.slow
def test_another_size_later_stays_out_of_the_learners_cache(seen):
    made, _, own = seen
    inputs = torch.randn(3, 77)
    before = counters["stats"]["unique_graphs"]
    assert torch.equal(made.call(*inputs), fused(*inputs))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert list(own.iterdir()) == []


@needs_compiler
@pytest.mark.slow
def test_a_module_is_compiled_too_with_its_breaks_and_warns_of_nothing(seen, capfd, recwarn):
    model, x = Broken().requires_grad_(False), torch.randn(3, 4)
    made = compile.compiled(model, x)
    assert torch.allclose(made.call(x), model(x))
    assert (made.graphs, made.kernels) == (torch._dynamo.explain(model)(x).graph_count, 1) == (2, 1)
    assert [(b.operator, b.place.line) for b in made.breaks] == [("graph_break()", line(Broken, "break 1"))]
    assert not recwarn.list and capfd.readouterr() == ("", "")


def interrupted(folder: str, said):
    """Compiles what is compiled already, until it is interrupted, and then once more."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    inputs = torch.randn(3, 1000)
    try:
        while True:
            compile.compiled(fused, *inputs)
    except KeyboardInterrupt:
        made = compile.compiled(fused, *inputs)
        said.send((made.kernels, made.compile_s))
    said.recv()


@needs_compiler
@pytest.mark.slow
def test_an_interrupt_while_it_compiles_anew_leaves_no_process_and_no_file(seen, tmp_path):
    context = multiprocessing.get_context("fork")  # with all that is imported, and compiled
    here, there = context.Pipe()
    child = context.Process(target=interrupted, args=(str(tmp_path), there))
    child.start()
    try:
        me, ends = psutil.Process(child.pid), time.monotonic() + 60
        while not (running := compilers(me)) and time.monotonic() < ends:
            time.sleep(0.01)
        assert running
        os.kill(child.pid, signal.SIGINT)  # Python alone: a terminal would signal the compilers too
        gone, alive = psutil.wait_procs(running, timeout=20)
        assert gone and not alive
        assert here.poll(60)
        kernels, compile_s = here.recv()
        assert kernels == 1 and compile_s > seen[0].compile_s / 20, "the same function is compiled anew each time"
        assert me.children(recursive=True) == [] and list(tmp_path.iterdir()) == []
        here.send("end")
        child.join(20)
        assert child.exitcode == 0 and list(tmp_path.iterdir()) == []
    finally:
        if child.is_alive():
            os.killpg(child.pid, signal.SIGKILL)
            child.join()


def compilers(process: psutil.Process) -> list[psutil.Process]:
    return [p for p in process.children(recursive=True) if "cc1plus" in p.name()]


def test_without_a_compiler_there_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert machine.missing("compiler")
    with pytest.raises(PerflabError, match=r"no C\+\+ compiler here") as caught:
        compile.compiled(fused, *torch.randn(3, 8))
    assert "\n" not in str(caught.value)
    assert left_over() == set()


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ZeroDivisionError):
        compile.breaks(lambda x: x + 1 / 0, torch.ones(1))


@needs_compiler
@pytest.mark.parametrize("failing", ["exit 1", "echo 'x.cpp:1:1: fatal error: No space left on device' >&2; exit 1"])
def test_a_compiler_that_fails_is_one_sentence(seen, tmp_path, failing):
    """It answers when it is asked for its version, and no more."""
    from torch._inductor import config

    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\n{failing}\n')
    compiler.chmod(0o755)
    before = left_over()
    with config.patch({"cpp.cxx": str(compiler)}), pytest.raises(PerflabError, match="compiler failed") as caught:
        compile.compiled(fused, *torch.randn(3, 8))
    assert "\n" not in str(caught.value) and ("No space" in str(caught.value)) == ("No space" in failing)
    assert left_over() == before


def test_no_folder_for_the_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/folder")
    with pytest.raises(PerflabError, match="set TMPDIR"):
        compile.compiled(fused, *torch.randn(3, 8))


# -- breaks


@pytest.mark.parametrize(
    ("function", "operators"),
    [(noisy, [".item()", "print"]), (branching, ["if on a tensor"]), (talking, ["print"]), (clean, [])],
)
def test_a_break_has_its_operator_and_line(function, operators):
    found = compile.breaks(function, torch.eye(4))
    assert [b.operator for b in found] == operators
    assert [b.place.line for b in found] == [line(function, f"break {k + 1}") for k in range(len(operators))]
    assert {b.place.file for b in found} <= {__file__}
    assert all(b.cause and "\n" not in str(b) for b in found)


def test_explain_sees_the_same_breaks():
    theirs = torch._dynamo.explain(noisy)(torch.eye(4)).break_reasons
    assert [r.user_stack[-1].lineno for r in theirs] == [b.place.line for b in compile.breaks(noisy, torch.eye(4))]


def test_a_break_in_a_called_function_is_named_once_and_there():
    def outer(x):
        return noisy(x * 2) + 1

    assert [b.place.line for b in compile.breaks(outer, torch.eye(4))] == [
        line(noisy, "break 1"),
        line(noisy, "break 2"),
    ]


def test_a_break_in_a_notebook_cell_has_no_path():
    scope = {}
    exec(
        builtins.compile("def f(x):\n    y = x + 1\n    return y * y.sum().item()", "/tmp/ipykernel_7/123.py", "exec"),
        scope,
    )
    (found,) = compile.breaks(scope["f"], torch.ones(2))
    assert str(found) == ".item() (cell, line 3): it reads a number from a tensor"


# -- compiled again


def sizes(n: int):
    return [(torch.randn(k, 4),) for k in range(2, 2 + n)]


def theirs(function, inputs, **how) -> int:
    """The number of graphs by torch's own counter."""
    torch._dynamo.reset()
    counters.clear()
    ready = torch.compile(function, backend="eager", **how)
    for given in inputs:
        ready(*given)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("look", ["first", "second"])
def test_twelve_sizes_make_eight_graphs_and_then_run_eager(look):
    seen = compile.recompiles(lambda x: x.sin().sum(), sizes(12), dynamic=False)
    assert (seen.graphs, seen.limit, seen.eager) == (8, 8, True)
    assert seen.how == ("compiled",) * 8 + ("eager",) * 4
    assert str(seen.failed[0]) == "call 1: size of x at dimension 0 was 2, now it is 3"
    assert [(g.before, g.now) for g in seen.failed[:7]] == [(str(k), str(k + 1)) for k in range(2, 9)]
    assert "now running eager" in str(seen)


@pytest.mark.parametrize("look", ["first", "second"])
def test_left_alone_it_takes_the_size_as_changing(look):
    seen = compile.recompiles(lambda x: x.sin().sum(), sizes(12))
    assert (seen.graphs, seen.eager) == (2, False)
    assert seen.how == ("compiled",) * 2 + ("reused",) * 10
    assert len(seen.failed) == 1 and "eager" not in str(seen)


def test_twelve_texts_make_eight_graphs():
    calls = [(torch.ones(4), f"step{k}") for k in range(12)]
    seen = compile.recompiles(scaled, calls)
    assert (seen.graphs, seen.eager) == (8, True)
    assert str(seen.failed[0]) == "call 1: name was 'step0', now it is 'step1'"


@pytest.mark.parametrize("how", [{"dynamic": False}, {}])
def test_torch_counts_the_same_graphs(how):
    assert compile.recompiles(clean_sum, sizes(5), **how).graphs == theirs(clean_sum, sizes(5), **how)


def clean_sum(x):
    return x.sin().sum()


def test_a_tensor_in_place_of_a_number_is_compiled_once():
    seen = compile.recompiles(lambda x, s: x * s, [(torch.ones(4), torch.tensor(float(k))) for k in range(5)])
    assert (seen.graphs, seen.failed, seen.eager) == (1, (), False)


def test_another_dtype_is_named():
    seen = compile.recompiles(lambda x: x + 1, [(torch.ones(3),), (torch.ones(3).double(),)])
    assert "x" in str(seen.failed[0]) and "ouble" in seen.failed[0].now


def test_no_call_to_look_at_is_one_sentence():
    with pytest.raises(PerflabError, match="at least one call"):
        compile.recompiles(clean_sum, [])


def test_what_has_no_operator_is_not_said_to_have_reached_a_limit():
    seen = compile.recompiles(lambda x: 3, sizes(3))
    assert (seen.graphs, seen.eager, set(seen.how)) == (0, False, {"eager"})
    assert "nothing of it is compiled" in str(seen) and "limit" not in str(seen)


def test_a_global_that_changed_is_named_as_it_is_written():
    def grows(x):
        GROWN.append(1)
        return x + len(GROWN)

    seen = compile.recompiles(grows, sizes(2)[:1] * 2)
    assert str(seen.failed[0]) == "call 1: the condition was not GROWN"


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, scale):
        self.calls += 1
        return x * self.calls * scale


def test_a_module_says_what_changed_by_the_names_of_its_source():
    counting = compile.recompiles(Counting(), [(torch.ones(3), 2.0)] * 3)
    assert str(counting.failed[0]) == "call 1: Counting.calls was 0"
    scales = compile.recompiles(torch.nn.ReLU(), sizes(2))
    assert str(scales.failed[0]) == "call 1: size of input at dimension 0 was 2, now it is 3"
    graded = compile.recompiles(clean_sum, [(torch.ones(3),), (torch.ones(3, requires_grad=True),)])
    assert str(graded.failed[0]) == "call 1: requires_grad of x was 0"


def test_a_method_of_no_module_is_named():
    (found,) = compile.breaks(lambda x: x * random.random(), torch.ones(3))
    assert found.operator == "Random.random"


GROWN = []


# -- arithmetic and modes


@pytest.mark.parametrize(
    ("compile_s", "before_s", "after_s", "calls"),
    [(10, 3e-3, 1e-3, 5000), (10, 1e-3, 1e-3, math.inf), (10, 1e-3, 2e-3, math.inf), (1, 2, 0.5, 1), (0, 2, 1, 0)],
)
def test_break_even_is_the_cost_over_the_gain_of_a_call(compile_s, before_s, after_s, calls):
    assert compile.break_even(compile_s, before_s, after_s) == calls


def test_an_unknown_mode_is_one_sentence():
    with pytest.raises(PerflabError, match="reduce-overhead"):
        compile.compiled(fused, *torch.ones(3, 2), mode="fastest")
