"""torch.compile from outside: kernels, graphs, breaks, guards; and that nothing of it is left behind."""

import inspect
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch._dynamo.utils import counters

from perflab import PerflabError
from perflab.bench import closing, machine
from perflab.kernels import fusion

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


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Three functions compiled in a process whose own cache and temporary folder are watched."""
    patch = pytest.MonkeyPatch()
    own = tmp_path_factory.mktemp("own")
    patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    processes = set(closing.kin())
    assert left_over() == set()
    x = torch.randn(1000)
    made = {"fused": fusion.compiled(fused, x, x, x), "again": fusion.compiled(fused, x, x, x)}
    after = {
        "processes": set(closing.kin()) - processes,
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
    assert torch.equal(made["fused"].call(x, a, b), fused(x, a, b))
    assert (made["fused"].kernels, made["fused"].graphs, made["fused"].breaks) == (1, 1, ())
    assert made["fused"].compile_s > 0.05


@needs_compiler
def test_the_same_function_is_compiled_anew_each_time(seen):
    first, again = seen[0]["fused"], seen[0]["again"]
    assert again.kernels == first.kernels == 1
    assert again.compile_s > first.compile_s / 20
    assert first.start_s > 0 or again.start_s == 0


@needs_compiler
def test_what_was_compiled_before_stays_compiled(seen):
    x = torch.randn(1000)
    before = counters["stats"]["unique_graphs"]
    for name in ("fused", "again"):
        seen[0][name].call(x, x, x)
    assert counters["stats"]["unique_graphs"] == before > 0


@needs_compiler
def test_nothing_is_left_by_compiling(seen):
    assert seen[1] == {"processes": set(), "folders": set(), "cache": [], "place": True}


@needs_compiler
@pytest.mark.slow
def test_breaks_are_named_while_compiling():
    made = fusion.compiled(branching, torch.eye(4))
    assert made.graphs == torch._dynamo.explain(branching)(torch.eye(4)).graph_count == 2
    assert [(b.operator, b.line) for b in made.breaks] == [("if on a tensor", line(branching, "break 1"))]


@needs_compiler
@pytest.mark.slow
def test_another_size_later_stays_out_of_the_learners_cache(seen):
    made, _, own = seen
    x = torch.randn(77)
    before = counters["stats"]["unique_graphs"]
    assert torch.equal(made["again"].call(x, x, x), fused(x, x, x))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert list(own.iterdir()) == []


@needs_compiler
@pytest.mark.slow
def test_a_module_is_compiled_too_and_warns_of_nothing(capfd, recwarn):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    x = torch.randn(3, 4)
    made = fusion.compiled(model, x)
    assert torch.allclose(made.call(x), model(x))
    assert made.graphs == 1 and made.kernels >= 1
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_without_a_compiler_there_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert machine.missing("compiler")
    with pytest.raises(PerflabError, match=r"no C\+\+ compiler here") as caught:
        fusion.compiled(fused, *torch.randn(3, 8))
    assert "\n" not in str(caught.value)
    assert left_over() == set()


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ZeroDivisionError):
        fusion.breaks(lambda x: x + 1 / 0, torch.ones(1))


@needs_compiler
@pytest.mark.slow
def test_an_interrupt_while_it_compiles_leaves_no_process_and_no_file(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch\n"
        "from perflab.kernels import fusion\n"
        "def f(x): return torch.relu(x + 1) * 2\n"
        "try:\n"
        "    while True: fusion.compiled(f, torch.ones(8))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', fusion.compiled(f, torch.ones(8)).kernels, flush=True)\n"
        "input()\n"
    )
    folder = tmp_path / "t"
    folder.mkdir()
    child = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        me, ends = psutil.Process(child.pid), time.monotonic() + 150
        while not (running := compilers(me)) and time.monotonic() < ends:
            time.sleep(0.01)
        assert running
        os.kill(child.pid, signal.SIGINT)  # Python alone: a terminal would signal the compilers too
        gone, alive = psutil.wait_procs(running, timeout=20)
        assert gone and not alive
        assert child.stdout.readline() == "interrupted 1\n"
        assert me.children(recursive=True) == []
        assert list(folder.iterdir()) == []
        child.communicate("\n", timeout=20)
        assert child.returncode == 0 and list(folder.iterdir()) == []
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def compilers(process: psutil.Process) -> list[psutil.Process]:
    return [p for p in process.children(recursive=True) if "cc1plus" in p.name()]


# -- breaks


@pytest.mark.parametrize(
    ("function", "operators"),
    [(noisy, [".item()", "print"]), (branching, ["if on a tensor"]), (talking, ["print"]), (clean, [])],
)
def test_a_break_has_its_operator_and_line(function, operators):
    found = fusion.breaks(function, torch.eye(4))
    assert [b.operator for b in found] == operators
    assert [b.line for b in found] == [line(function, f"break {k + 1}") for k in range(len(operators))]
    assert {b.file for b in found} <= {"test_fusion.py"}
    assert all(b.cause and "\n" not in str(b) for b in found)


def test_explain_sees_the_same_breaks():
    theirs = torch._dynamo.explain(noisy)(torch.eye(4)).break_reasons
    assert [r.user_stack[-1].lineno for r in theirs] == [b.line for b in fusion.breaks(noisy, torch.eye(4))]


def test_a_break_in_a_called_function_is_named_once_and_there():
    def outer(x):
        return noisy(x * 2) + 1

    assert [b.line for b in fusion.breaks(outer, torch.eye(4))] == [line(noisy, "break 1"), line(noisy, "break 2")]


def test_a_break_in_a_notebook_cell_has_no_path():
    scope = {}
    exec(compile("def f(x):\n    y = x + 1\n    return y * y.sum().item()", "/tmp/ipykernel_7/123.py", "exec"), scope)
    (found,) = fusion.breaks(scope["f"], torch.ones(2))
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
    seen = fusion.recompiles(lambda x: x.sin().sum(), sizes(12), dynamic=False)
    assert (seen.graphs, seen.limit, seen.eager) == (8, 8, True)
    assert seen.how == ("compiled",) * 8 + ("eager",) * 4
    assert str(seen.failed[0]) == "call 1: size of x at dimension 0 was 2, now it is 3"
    assert [(g.before, g.now) for g in seen.failed[:7]] == [(str(k), str(k + 1)) for k in range(2, 9)]
    assert "now running eager" in str(seen)


@pytest.mark.parametrize("look", ["first", "second"])
def test_left_alone_it_takes_the_size_as_changing(look):
    seen = fusion.recompiles(lambda x: x.sin().sum(), sizes(12))
    assert (seen.graphs, seen.eager) == (2, False)
    assert seen.how == ("compiled",) * 2 + ("reused",) * 10
    assert len(seen.failed) == 1 and "eager" not in str(seen)


def test_twelve_texts_make_eight_graphs():
    calls = [(torch.ones(4), f"step{k}") for k in range(12)]
    seen = fusion.recompiles(scaled, calls)
    assert (seen.graphs, seen.eager) == (8, True)
    assert str(seen.failed[0]) == "call 1: name was 'step0', now it is 'step1'"


@pytest.mark.parametrize("how", [{"dynamic": False}, {}])
def test_torch_counts_the_same_graphs(how):
    assert fusion.recompiles(clean_sum, sizes(5), **how).graphs == theirs(clean_sum, sizes(5), **how)


def clean_sum(x):
    return x.sin().sum()


def test_a_tensor_in_place_of_a_number_is_compiled_once():
    seen = fusion.recompiles(lambda x, s: x * s, [(torch.ones(4), torch.tensor(float(k))) for k in range(5)])
    assert (seen.graphs, seen.failed, seen.eager) == (1, (), False)


def test_another_dtype_is_named():
    seen = fusion.recompiles(lambda x: x + 1, [(torch.ones(3),), (torch.ones(3).double(),)])
    assert "x" in str(seen.failed[0]) and "ouble" in seen.failed[0].now


def test_no_inputs_are_one_sentence():
    with pytest.raises(PerflabError, match="at least one call"):
        fusion.recompiles(clean_sum, [])


# -- arithmetic and modes


@pytest.mark.parametrize(
    ("compile_s", "before_s", "after_s", "calls"),
    [(10, 3e-3, 1e-3, 5000), (10, 1e-3, 1e-3, math.inf), (10, 1e-3, 2e-3, math.inf), (1, 2, 0.5, 1), (0, 2, 1, 0)],
)
def test_break_even_is_the_cost_over_the_gain_of_a_call(compile_s, before_s, after_s, calls):
    assert fusion.break_even(compile_s, before_s, after_s) == calls


def test_the_modes_with_cuda_graphs_are_two():
    with_graphs = {name for name, row in fusion.modes().items() if row["cuda_graphs"] == "yes"}
    assert with_graphs == {"reduce-overhead", "max-autotune"}


def test_an_unknown_mode_is_one_sentence():
    with pytest.raises(PerflabError, match="reduce-overhead"):
        fusion.compiled(fused, *torch.ones(3, 2), mode="fastest")
