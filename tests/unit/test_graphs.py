"""What forbids a CUDA graph, seen without one; and the guards around a graph, on a stand-in that replays."""

import functools
import operator

import pytest
import torch
from torch import nn

from perflab import PerflabError
from perflab.bench import machine
from perflab.launch import breaks, graphs, waits

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here")]
needs_no_cuda = pytest.mark.skipif(machine.cuda_devices() > 0, reason="says what a machine without CUDA hears")
X = torch.tensor([1.0, -2.0, 3.0, -4.0])


OWN = torch.Generator()
FORBIDDEN = [  # the operator as it is written, and a line of it
    (".item()", lambda x: x * x.sum().item()),
    ("bool() or if on a tensor", lambda x: x + 1 if x.sum() > 0 else x),
    ("float() of a tensor", lambda x: x * float(x[0])),
    ("a tensor in a text", lambda x: x + len(f"{x}")),
    ("a tensor in a text", lambda x: x + len(f"{x[0]:.3f}")),
    ("print or str of a tensor", lambda x: x + len(str(x))),
    ("a boolean mask as index", lambda x: x[x > 0].sum()),
    ("a boolean mask as index", lambda x: operator.setitem(x.clone(), x > 0, x[:2])),
    ("nonzero", lambda x: torch.nonzero(x) * 2),
    ("nonzero", lambda x: torch.nonzero(x, as_tuple=True)[0]),
    ("argwhere", lambda x: torch.argwhere(x) * 2),
    ("where", lambda x: torch.where(x > 0)[0]),
    ("masked_select", lambda x: torch.masked_select(x, x > 0)),
    ("unique", lambda x: torch.unique(x) * 2),
    ("repeat_interleave", lambda x: torch.repeat_interleave(x, (x > 0).long())),
    (".tolist()", lambda x: sum((x * 2).tolist())),
    (".cpu()", lambda x: x.cpu() + 1),
    ("synchronize()", lambda x: (torch.cuda.synchronize(), x + 1)[1]),
    ("manual_seed()", lambda x: torch.manual_seed(0) and torch.rand_like(x)),
    ("tensor", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)),
    ("linalg_inv", lambda x: torch.linalg.inv(torch.outer(x, x) + torch.eye(4, device=x.device))),
    ("one_hot", lambda x: nn.functional.one_hot((x > 0).long()) * 2),
    ("rand", lambda x: x + torch.rand(4, generator=OWN)),
]


def chain(x):
    for _ in range(5):
        x = torch.relu(x + 1) * 0.5
    return x


def filled(x):
    y = x.clone()
    y[y > 0] = 0.0
    return y


ALLOWED = {
    "chain": chain,
    "chosen on the device": lambda x: torch.where(x.sum() > 0, x + 1, x),
    "filled": filled,
    "repeated to a size": lambda x: torch.repeat_interleave(x, torch.ones_like(x, dtype=torch.long), output_size=4),
    "twice each": lambda x: torch.repeat_interleave(x, 2),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "taken": lambda x: x[torch.arange(2, device=x.device)] + x[:2],
    "sorted": lambda x: torch.topk(x, 2).values + x.sort().values[:2],
    "classes given": lambda x: nn.functional.one_hot((x > 0).long(), 2) * 2,
}


@pytest.fixture(params=[False, True], ids=["", "inference"])
def inference(request):
    """In both modes: under inference_mode torch hands over operators that are made of others as they are."""
    with torch.inference_mode(request.param):
        yield


# -- what forbids a capture


@pytest.mark.parametrize(("written", "function"), FORBIDDEN, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_captured_is_named_with_its_line(inference, written, function):
    (found,) = waits.forbids(function, X.clone())
    assert found.operator == written
    assert (found.place.file, found.place.line) == (__file__, function.__code__.co_firstlineno)
    assert found.why and str(found).count("\n") == 0


@pytest.mark.parametrize("name", ALLOWED)
def test_what_can_be_captured_is_let_through(inference, name):
    assert waits.forbids(ALLOWED[name], X.clone()) == []


def test_a_line_is_named_once_however_often_it_runs():
    def often(x):
        return sum(x[k].item() for k in range(4))

    assert len(waits.forbids(often, X)) == 1


def test_the_line_is_the_innermost_of_the_callers_own():
    item = FORBIDDEN[0][1]

    def outer(x):
        return nn.Sequential(nn.ReLU())(item(x))

    (found,) = waits.forbids(outer, X)
    assert found.place.line == item.__code__.co_firstlineno


def test_a_line_of_a_notebook_cell_has_no_path():
    scope = {}
    exec(compile("def f(x):\n    y = x + 1\n    return y.sum().item()", "/tmp/ipykernel_7/1.py", "exec"), scope)
    assert str(waits.forbids(scope["f"], X)[0].place) == "cell, line 3"


def test_a_training_step_is_looked_through_backward_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert waits.forbids(step, X) == []


def test_an_optimizer_that_counts_on_the_host_is_named():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(x):
        model(x).sum().backward()
        optimizer.step()

    (found,) = waits.forbids(step, X)
    assert (found.operator, found.place.code) == (".item()", "optimizer.step()")


def test_the_inputs_and_the_functions_of_torch_stay_as_they_were():
    before = [torch.cuda.synchronize, torch.manual_seed, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize]
    x = X.clone()
    waits.forbids(lambda x: x.add_(1), x)
    with pytest.raises(ZeroDivisionError):
        waits.forbids(lambda x: x + 1 / 0, x)
    assert torch.equal(x, X)
    after = [torch.cuda.synchronize, torch.manual_seed, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize]
    assert after == before


def test_what_was_compiled_is_looked_at_as_it_was_written():
    assert len(waits.forbids(torch.compile(lambda x: x * x.sum().item(), backend="eager"), X)) == 1
    assert waits.forbids(torch.compile(chain, backend="eager"), X) == []


@pytest.mark.parametrize("ask", [waits.forbids, graphs.capture, breaks.breaks])
def test_what_cannot_be_called_is_one_sentence(ask):
    with pytest.raises(PerflabError, match="type Tensor"):
        ask(X.sum(), X)


@needs_no_cuda
@pytest.mark.parametrize(
    "ask",
    [
        lambda: graphs.capture(chain, X),
        lambda: graphs.capture_step(nn.Linear(4, 4), nn.MSELoss(), None, X, X),
        lambda: graphs.listing(True),
    ],
)
def test_without_a_device_there_is_one_sentence(ask):
    with pytest.raises(PerflabError, match=r"^A CUDA graph cannot be captured: no CUDA device here\.$"):
        ask()


# -- the guards of a graph


class Replays:
    """Does on the tensors of the capture what a CUDAGraph does: same addresses, each time anew."""

    def __init__(self, call, inputs, outputs):
        self.call, self.inputs, self.outputs = call, inputs, outputs

    def replay(self):
        self.outputs.copy_(self.call(*self.inputs))

    def reset(self):
        self.call = None


def double(x, scale=2):
    return x * scale


def stand_in(call, *inputs):
    static = waits.copied(inputs)
    out = call(*static)
    return graphs.Graph(call, Replays(call, static, out), static, out)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def captured(request):
    """Captures `double`: with a graph on CUDA, where the tensors of the test are too, and with its stand-in on CPU."""
    with torch.device(request.param):
        yield functools.partial(graphs.capture if request.param == "cuda" else stand_in, double)


def test_each_call_computes_on_its_own_input_and_keeps_its_own_result(captured):
    graph = captured(torch.zeros(8, 4))
    a, b = torch.ones(8, 4), torch.full((8, 4), 3.0)
    first, second = graph(a), graph(b)
    assert torch.equal(first, a * 2) and torch.equal(second, b * 2)
    assert torch.equal(graph.outputs, second), "the output of the graph is overwritten by each replay"


@pytest.mark.parametrize("shape", [(1, 4), (4,), (8, 1), ()])
def test_a_shape_that_copy_would_broadcast_is_refused(captured, shape):
    graph = captured(torch.zeros(8, 4))
    torch.zeros(8, 4).copy_(torch.ones(shape))  # in silence
    with pytest.raises(PerflabError, match="Input x has shape") as caught:
        graph(torch.ones(shape))
    assert str(shape) in str(caught.value) and "(8, 4)" in str(caught.value) and "pad" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ((torch.ones(8, 4).double(),), "float64"),
        ((torch.ones(8, 4, device="meta"),), "meta"),
        ((3.0,), "was a tensor"),
        (([torch.ones(8, 4)],), "containers"),
        ((torch.ones(8, 4), 3), "2"),
        ((), "0"),
    ],
)
def test_another_input_is_one_sentence(captured, wrong, word):
    with pytest.raises(PerflabError, match=word) as caught:
        captured(torch.zeros(8, 4))(*wrong)
    assert "\n" not in str(caught.value)


def test_a_number_is_kept_and_another_one_refused(captured):
    graph = captured(torch.zeros(2), 2)
    assert torch.equal(graph(torch.ones(2), 2), torch.full((2,), 2.0))
    with pytest.raises(PerflabError, match="Input scale was 2 when it was captured and is 3"):
        graph(torch.ones(2), 3)


def test_a_closed_graph_says_so(captured, monkeypatch):
    if not machine.cuda_devices():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with captured(torch.zeros(2)) as graph:
        graph(torch.ones(2))
    assert graph.inputs is None and graph.outputs is None
    for ask in (lambda: graph(torch.ones(2)), graph.replay):
        with pytest.raises(PerflabError, match="closed"):
            ask()
    graph.close()


# -- steps that are taken back


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.AdamW,
        torch.optim.Adamax,
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        torch.optim.Adadelta,
        torch.optim.RAdam,
    ],
    ids=["SGD", "momentum", "Adam", "AdamW", "Adamax", "RMSprop", "Adadelta", "RAdam"],
)
@pytest.mark.parametrize("taken", [0, 2])
def test_training_goes_on_as_if_the_warm_up_had_not_been(make, taken):
    def run(warm_ups: int):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = make(model.parameters())
        x = torch.randn(16, 4)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(taken):
            step()
        with graphs._put_back(model, optimizer):
            for _ in range(warm_ups):
                step()
        for _ in range(3):
            step()
        return [x.clone() for x in [*model.parameters(), *model.buffers()]]

    assert all(torch.equal(a, b) for a, b in zip(run(0), run(4), strict=True))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (torch.optim.Adam, r"capturable=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "take one step"),
        (lambda p: torch.optim.NAdam(p, capturable=True), "take one step"),
    ],
)
def test_an_optimizer_that_cannot_be_captured_hears_the_way_out(make, word):
    with pytest.raises(PerflabError, match=word):
        graphs._check_optimizer(make(nn.Linear(2, 2).parameters()))
