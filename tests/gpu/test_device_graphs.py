"""CUDA graphs and torch.compile on a device: equal results, guards, training, and what a failed capture leaves."""

import copy
import importlib.util
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from perflab import PerflabError
from perflab.bench import cleanup, machine, process
from perflab.errors import first_line
from perflab.launch import compile, graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]

_spec = importlib.util.spec_from_file_location("forbidding", Path(__file__).parents[1] / "unit" / "test_graphs.py")
examples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(examples)
# Neither waits for the device: torch's own look at what does cannot see them.
UNSEEN = {"manual_seed()", "rand", "synchronize()"}
WAITING = [function for written, function in examples.FORBIDDEN if written not in UNSEEN]
CERTAIN = [function for name, function in examples.ALLOWED.items() if name != "dropout"]


def x4():
    return examples.X.to("cuda")


def chain(x, y):
    for _ in range(20):
        x = torch.relu(x + y) * 0.9
    return x


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).cuda()


def usable() -> bool:
    """Can this process still make a model, draw numbers and capture?"""
    model = nn.Linear(16, 16, device="cuda")
    with torch.no_grad(), graphs.capture(model, torch.randn(4, 16, device="cuda")) as graph:
        x = torch.randn(4, 16, device="cuda")
        return torch.allclose(graph(x), model(x))


# -- equal results


def test_a_graph_computes_what_the_call_does():
    static = torch.randn(2, 64, 64, device="cuda").unbind()
    graph = graphs.capture(chain, *static)
    for _ in range(3):
        x, y = torch.randn(2, 64, 64, device="cuda").unbind()
        assert torch.equal(graph(x, y), chain(x, y))


def test_containers_go_in_and_come_out():
    def call(batch, pair):
        return {"sum": batch["a"] + pair[0], "both": (batch["a"] * 2, pair[1] - 1)}

    def inputs(seed):
        torch.manual_seed(seed)
        a, b, c = torch.randn(3, 8, device="cuda").unbind()
        return {"a": a}, [b, c]

    graph, new = graphs.capture(call, *inputs(0)), inputs(1)
    got, expected = graph(*new), call(*new)
    assert torch.equal(got["sum"], expected["sum"])
    assert all(torch.equal(a, b) for a, b in zip(got["both"], expected["both"], strict=True))


def test_a_new_tensor_gives_stale_results_on_a_bare_graph_and_right_ones_here():
    x, new = torch.randn(2, 8, 64, device="cuda").unbind()
    bare, out = graphs.bare_capture(torch.neg, (x,))
    bare.replay()
    kept = out.clone()
    x = new  # binds the name, and copies nothing
    bare.replay()
    assert torch.equal(out, kept) and not torch.equal(out, torch.neg(x))
    assert torch.equal(graphs.capture(torch.neg, new)(x), torch.neg(x))


def test_an_input_on_the_host_is_refused_before_and_after():
    with pytest.raises(PerflabError, match="Input 0 is on cpu"):
        graphs.capture(torch.neg, torch.zeros(8))
    with pytest.raises(PerflabError, match="has device cpu and was captured with cuda"):
        graphs.capture(torch.neg, torch.zeros(8, device="cuda"))(torch.ones(8))


def test_each_replay_draws_its_own_numbers():
    graph = graphs.capture(lambda x: nn.functional.dropout(x, 0.5), torch.ones(4096, device="cuda"))
    a, b = (graph(torch.ones(4096, device="cuda")) for _ in range(2))
    assert not torch.equal(a, b) and a.mean().item() == pytest.approx(1, abs=0.2)


def test_closing_gives_the_memory_back():
    x = torch.randn(64, 2**20, device="cuda")
    cleanup.release()
    before = torch.cuda.memory_reserved()
    with graphs.capture(lambda x: (x + 1) * 2, x) as graph:
        graph(x)
        held = torch.cuda.memory_reserved()
    del graph
    cleanup.release()
    assert held > before + x.nbytes
    assert torch.cuda.memory_reserved() <= before + 2**21


# -- training


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True, fused=True),
    ],
    ids=["SGD", "Adam", "AdamW fused"],
)
def test_a_captured_training_step_trains_as_the_eager_one(make):
    model, loss = network(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    optimizer, eager = make(model.parameters()), make(twin.parameters())
    batches = [(torch.randn(16, 32, device="cuda"), torch.randint(0, 8, (16,), device="cuda")) for _ in range(5)]
    graph = graphs.capture_step(model, loss, optimizer, *batches[0])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for x, target in batches:
        captured = graph(x, target)
        eager.zero_grad(set_to_none=True)
        expected = loss(twin(x), target)
        expected.backward()
        eager.step()
        assert captured.item() == pytest.approx(expected.item(), rel=1e-3)
    moved = network()
    for a, b, start in zip(model.parameters(), twin.parameters(), moved.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4) and not torch.equal(a, start)


def test_graphed_callables_of_torch_give_the_gradients_of_eager():
    """The other way: forward and backward captured, the optimizer and the rest left as they are."""
    model = network().eval()
    twin, x = copy.deepcopy(model), torch.randn(16, 32, device="cuda")
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn_like(x),))
    graphed(x).square().mean().backward()
    twin(x).square().mean().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_an_optimizer_that_counts_on_the_host_is_refused_and_nothing_is_spoiled():
    model = network()
    with pytest.raises(PerflabError, match="capturable=True"):
        graphs.capture_step(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), torch.ones(2, 32, device="cuda"))
    assert usable()


# -- what forbids a capture


@pytest.mark.parametrize("function", WAITING)
def test_what_torch_sees_waiting_is_what_is_named(function):
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            function(x4())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(PerflabError, match=f"line {function.__code__.co_firstlineno}"):
        graphs.capture(function, x4())


@pytest.mark.parametrize("function", CERTAIN)
def test_what_is_let_through_is_captured(function):
    with graphs.capture(function, x4()) as graph:
        x = x4() * torch.tensor([2.0, -1.0, 0.5, 3.0], device="cuda")
        assert torch.equal(graph(x), function(x))


def test_after_all_refusals_the_process_goes_on():
    for written, function in examples.FORBIDDEN:
        if written != "rand":
            with pytest.raises(PerflabError):
                graphs.capture(function, x4())
    assert usable()


def fails_unseen() -> dict:
    """A capture that fails though nothing was named, and what is left of its process."""
    graphs.forbids = lambda call, *inputs: []
    try:
        graphs.capture(lambda x: x * x.sum().item() + torch.rand_like(x), torch.ones(4, device="cuda"))
        said = "captured"
    except PerflabError as e:
        said = str(e)
    try:
        torch.nn.Linear(8, 8, device="cuda").weight.sum().item()
        return {"said": said, "usable": 1}
    except Exception as e:
        return {"said": said, "usable": 0, "error": first_line(e)}


def test_a_capture_that_fails_says_truly_whether_its_process_goes_on():
    seen = process.call(fails_unseen)
    print(f"\n{seen}")
    assert "The capture failed" in seen["said"]
    assert ("goes on" in seen["said"]) == bool(seen["usable"])
    assert ("restart" in seen["said"]) == (not seen["usable"])


# -- the source's listing


def test_the_listing_holds_for_a_forward():
    seen = graphs.listing(False)
    print(f"\n{seen}")
    assert seen == {"captured": "yes", "results": "right", "process": "goes on", "error": "none"}


def test_the_listing_of_a_training_step_does_not_end_this_process():
    seen = graphs.listing(True)
    print(f"\n{seen}")
    assert set(seen) == {"captured", "results", "process", "error"}
    assert (seen["captured"] == "yes") == (seen["error"] == "none")
    assert usable()


def test_the_listing_warmed_up_with_whole_steps_is_recorded():
    """Not judged: what the same listing does where its warm-up runs backward and optimizer too."""
    print(f"\n{process.call(warmed_by_steps)}")


def warmed_by_steps() -> dict:
    model = network()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 32, device="cuda")

    def step():
        model(x).square().mean().backward()
        optimizer.step()

    try:
        for _ in range(3):
            step()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
        torch.cuda.synchronize()
    except Exception as e:
        return {"captured": "no", "error": first_line(e)}
    return {"captured": "yes"}


# -- compiling


def fused(x, a, b):
    return torch.relu(x + a) * b


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_is_one_kernel_with_equal_results_that_are_kept(mode):
    processes = set(cleanup.descendants())
    x, a, b = torch.randn(3, 2**16, device="cuda").unbind()
    made = compile.compiled(fused, x, a, b, mode=mode)
    print(f"\n{mode}: {made.compile_s:.2f} s, the start {made.start_s:.2f} s")
    assert (made.kernels, made.graphs, made.breaks) == (1, 1, ())
    first, second = made.call(x, a, b), made.call(b, a, x)
    assert torch.allclose(first, fused(x, a, b)) and torch.allclose(second, fused(b, a, x))
    assert set(cleanup.descendants()) <= processes
    assert not list(Path(tempfile.gettempdir()).glob("perflab-compile-*/*"))


def test_a_compiled_call_can_be_captured():
    x, a, b = torch.randn(3, 2**12, device="cuda").unbind()
    made = compile.compiled(fused, x, a, b)
    with torch.no_grad(), graphs.capture(made.call, x, a, b) as graph:
        assert torch.allclose(graph(b, a, x), fused(b, a, x))
