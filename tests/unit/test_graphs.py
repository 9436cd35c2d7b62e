"""What forbids a CUDA graph, seen without one; and the guards around a graph, on a stand-in that replays."""

import inspect
import os

import pytest
import torch
from torch import nn

from perflab import PerflabError
from perflab.bench import machine
from perflab.launch import breaks, capturable, graphs

pytestmark = pytest.mark.usefixtures("one_thread")
needs_no_cuda = pytest.mark.skipif(machine.cuda_devices() > 0, reason="says what a machine without CUDA hears")
X = torch.tensor([1.0, -2.0, 3.0, -4.0])


def item(x):
    return x * x.sum().item()  # here


def branch(x):
    if x.sum() > 0:  # here
        return x + 1
    return x


def as_float(x):
    y = x + 1
    return y * float(y[0])  # here


def mask(x):
    positive = x > 0
    return x[positive].sum()  # here


def mask_assigned(x):
    y = x.clone()
    y[y > 0] = x[:2]  # here
    return y


def nonzero(x):
    return torch.nonzero(x)  # here


def where_alone(x):
    return torch.where(x > 0)[0]  # here


def selected(x):
    return torch.masked_select(x, x > 0)  # here


def unique(x):
    return torch.unique(x)  # here


def repeated(x):
    counts = (x > 0).long()
    return torch.repeat_interleave(x, counts)  # here


def listed(x):
    y = x * 2
    return sum(y.tolist())  # here


def fetched(x):
    return x.cpu() + 1  # here


def synchronised(x):
    y = x + 1
    torch.cuda.synchronize()  # here
    return y


def seeded(x):
    torch.manual_seed(0)  # here
    return torch.rand_like(x) + x


def from_host(x):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # here


def inverse(x):
    return torch.linalg.inv(torch.outer(x, x) + torch.eye(4, device=x.device))  # here


def one_hot(x):
    return nn.functional.one_hot((x > 0).long()) * 2  # here


def generator_of_its_own(x):
    return x + torch.rand(4, generator=OWN)  # here


OWN = torch.Generator()
FORBIDDEN = {
    item: ".item()",
    branch: "bool() or if on a tensor",
    as_float: "float() of a tensor",
    mask: "a boolean mask as index",
    mask_assigned: "a boolean mask as index",
    nonzero: "nonzero",
    where_alone: "where",
    selected: "masked_select",
    unique: "unique",
    repeated: "repeat_interleave",
    listed: ".tolist()",
    fetched: ".cpu()",
    synchronised: "synchronize()",
    seeded: "manual_seed()",
    from_host: "tensor",
    inverse: "linalg_inv",
    one_hot: "one_hot",
    generator_of_its_own: "rand",
}


def chain(x):
    for _ in range(5):
        x = torch.relu(x + 1) * 0.5
    return x


def chosen_on_the_device(x):
    return torch.where(x.sum() > 0, x + 1, x)


def filled(x):
    y = x.clone()
    y[y > 0] = 0.0
    return y


def repeated_to_a_size(x):
    return torch.repeat_interleave(x, torch.ones_like(x, dtype=torch.long), output_size=4)


def twice_each(x):
    return torch.repeat_interleave(x, 2)


def dropped(x):
    return nn.functional.dropout(x, 0.5)


def taken(x):
    return x[torch.arange(2, device=x.device)] + x[:2]


def sorted_top(x):
    return torch.topk(x, 2).values + x.sort().values[:2]


ALLOWED = [chain, chosen_on_the_device, filled, repeated_to_a_size, twice_each, dropped, taken, sorted_top]


def line(function) -> int:
    source, first = inspect.getsourcelines(function)
    return next(first + k for k, text in enumerate(source) if text.rstrip().endswith("# here"))


# -- what forbids a capture


@pytest.mark.parametrize("function", FORBIDDEN, ids=lambda f: f.__name__)
def test_what_cannot_be_captured_is_named_with_its_line(function):
    (found,) = capturable.forbids(function, X)
    assert found.operator == FORBIDDEN[function]
    assert (found.place.file, found.place.line) == ("test_graphs.py", line(function))
    assert found.why and str(found).count("\n") == 0


@pytest.mark.parametrize("function", ALLOWED, ids=lambda f: f.__name__)
def test_what_can_be_captured_is_let_through(function):
    assert capturable.forbids(function, X) == []


def test_a_line_is_named_once_however_often_it_runs():
    def often(x):
        return sum(x[k].item() for k in range(4))

    assert len(capturable.forbids(often, X)) == 1


def test_the_line_is_the_innermost_of_the_callers_own():
    def outer(x):
        return nn.Sequential(nn.ReLU())(item(x))

    (found,) = capturable.forbids(outer, X)
    assert found.place.line == line(item)


def test_a_line_of_a_notebook_cell_has_no_path():
    scope = {}
    exec(compile("def f(x):\n    y = x + 1\n    return y.sum().item()", "/tmp/ipykernel_7/1.py", "exec"), scope)
    assert str(capturable.forbids(scope["f"], X)[0].place) == "cell, line 3"


def test_a_training_step_is_looked_through_backward_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert capturable.forbids(step, X) == []


def test_an_optimizer_that_counts_on_the_host_is_named():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(x):
        model(x).sum().backward()
        optimizer.step()  # here

    (found,) = capturable.forbids(step, X)
    assert (found.operator, found.place.line) == (".item()", line(step))


def test_the_inputs_and_the_functions_of_torch_stay_as_they_were():
    before = [torch.cuda.synchronize, torch.manual_seed, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize]
    x = X.clone()
    capturable.forbids(lambda x: x.add_(1), x)
    with pytest.raises(ZeroDivisionError):
        capturable.forbids(lambda x: x + 1 / 0, x)
    assert torch.equal(x, X)
    after = [torch.cuda.synchronize, torch.manual_seed, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize]
    assert after == before


def test_what_was_compiled_is_looked_at_as_it_was_written():
    assert len(capturable.forbids(torch.compile(item, backend="eager"), X)) == 1
    assert capturable.forbids(torch.compile(chain, backend="eager"), X) == []


@pytest.mark.parametrize("ask", [capturable.forbids, graphs.capture, breaks.breaks])
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


# -- a process of its own


def test_what_a_process_of_its_own_saw_comes_back():
    seen = capturable.apart(lambda: {"pid": os.getpid(), "text": "a"})
    assert seen["text"] == "a" and seen["pid"] != os.getpid()


def test_a_process_that_dies_is_a_reason():
    with pytest.raises(PerflabError, match="status 7"):
        capturable.apart(lambda: os._exit(7))


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


def captured(*inputs):
    static = capturable.copied(inputs)
    out = double(*static)
    return graphs.Graph(double, Replays(double, static, out), static, out)


def test_each_call_computes_on_its_own_input_and_keeps_its_own_result():
    graph = captured(torch.zeros(8, 4))
    a, b = torch.ones(8, 4), torch.full((8, 4), 3.0)
    first, second = graph(a), graph(b)
    assert torch.equal(first, a * 2) and torch.equal(second, b * 2)
    assert second.data_ptr() != graph.outputs.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("shape", [(1, 4), (4,), (8, 1), ()])
def test_a_shape_that_copy_would_broadcast_is_refused(shape):
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
def test_another_input_is_one_sentence(wrong, word):
    with pytest.raises(PerflabError, match=word) as caught:
        captured(torch.zeros(8, 4))(*wrong)
    assert "\n" not in str(caught.value)


def test_a_number_is_kept_and_another_one_refused():
    graph = captured(torch.zeros(2), 2)
    assert torch.equal(graph(torch.ones(2), 2), torch.full((2,), 2.0))
    with pytest.raises(PerflabError, match="Input scale was 2 when it was captured and is 3"):
        graph(torch.ones(2), 3)


def test_a_closed_graph_says_so(monkeypatch):
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
        before = graphs._state(model, optimizer)
        for _ in range(warm_ups):
            step()
        graphs._put_back(model, optimizer, before)
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
