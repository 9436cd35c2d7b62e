"""CUDA graphs: a capture done right, what forbids one, and the source's listing as it stands.

A graph replays kernels on the addresses of its capture. So its inputs are copied in, after a look at their
shapes, since copy_ broadcasts in silence; and its outputs are copied out, since the next replay overwrites them.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator

import torch
from torch.utils._pytree import tree_flatten, tree_map

from perflab.bench import machine, process
from perflab.errors import PerflabError, first_line

from .dispatch import check_callable
from .waits import Forbidden, copied, forbids

__all__ = ["Forbidden", "Graph", "capture", "capture_step", "forbids", "listing"]

WARM_UPS = 3
# Optimizers whose fresh state is all zeros, so that a warm-up can be taken back (torch.optim, the sources).
_FROM_ZERO = ("Adam", "AdamW", "Adamax", "RMSprop", "Adadelta", "RAdam", "SGD")
# What a tensor must have in common with the one that was captured: how it is printed, and the remedy.
_FACTS = [
    ("shape", tuple, "pad it, or capture one graph per shape"),
    ("dtype", str, "convert it before"),
    ("device", str, "move it before"),
]


class Graph:
    """A captured call. `graph(*inputs)` gives what the call would, in fresh tensors.

    `inputs` and `outputs` are the tensors that it reads and writes at each `replay()`. Both are freed by
    `close()`, or at the end of a `with`.
    """

    def __init__(self, call: Callable, graph: torch.cuda.CUDAGraph, inputs: tuple, outputs):
        self._graph, self.inputs, self.outputs = graph, inputs, outputs
        self._names = _input_names(call, len(inputs))

    def __call__(self, *inputs):
        if self._graph is not None and (why := _mismatch(self.inputs, inputs, self._names)):
            raise PerflabError(f"{why}.")
        with torch.no_grad():
            for static, new in zip(tree_flatten(self.inputs)[0], tree_flatten(inputs)[0], strict=True):
                if torch.is_tensor(static):
                    static.copy_(new, non_blocking=True)
            self.replay()
            return tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, self.outputs)

    def replay(self):
        """Run the captured kernels once more, on what `inputs` hold now."""
        if self._graph is None:
            raise PerflabError("This graph is closed: capture it again.")
        self._graph.replay()

    def close(self):
        """Free the graph and the memory of its own."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph = self.inputs = self.outputs = None

    def __enter__(self) -> "Graph":
        return self

    def __exit__(self, *_):
        self.close()


def _input_names(call: Callable, count: int) -> list[str]:
    """What the inputs of `call` are called: the names of its parameters, or else their numbers."""
    try:
        parameters = inspect.signature(getattr(call, "forward", call)).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD][:count]
    return [*names, *map(str, range(len(names), count))]


def _mismatch(captured: tuple, new: tuple, names: list[str]) -> str:
    """Why a graph that is captured for these inputs, called by `names`, cannot take the new ones, or ""."""
    if len(captured) != len(new):
        return f"A graph for {len(captured)} inputs cannot take {len(new)}"
    for name, old_input, new_input in zip(names, captured, new, strict=True):
        (old_leaves, old_tree), (leaves, tree) = tree_flatten(old_input), tree_flatten(new_input)
        if tree != old_tree:
            return f"Input {name} is built otherwise than when it was captured: give it the same containers"
        for old, x in zip(old_leaves, leaves, strict=True):
            if why := _difference(old, x):
                return f"Input {name} {why}"
    return ""


def _difference(old, new) -> str:
    """Why a graph that was captured with `old` cannot take `new`, or ""."""
    if not torch.is_tensor(old):
        if torch.is_tensor(new) or old != new:
            return f"was {old!r} when it was captured and is {new!r}: a graph keeps what is no tensor; pass a tensor"
        return ""
    if not torch.is_tensor(new):
        return f"was a tensor when it was captured and is {type(new).__name__}"
    for fact, printed, remedy in _FACTS:
        before, now = printed(getattr(old, fact)), printed(getattr(new, fact))
        if before != now:
            return f"has {fact} {now} and was captured with {before}: {remedy}"
    return ""


def _ready_for(inputs):
    """Raises PerflabError where there is no CUDA device, or an input that is not on it."""
    if why := machine.missing("cuda"):
        raise PerflabError(f"A CUDA graph cannot be captured: {why}.")
    for k, x in enumerate(inputs):
        for part in tree_flatten(x)[0]:
            if torch.is_tensor(part) and not part.is_cuda:
                raise PerflabError(f"Input {k} is on {part.device}: a graph reads memory of the device, so move it.")


@contextlib.contextmanager
def _side_stream():
    """Run on a stream that is not the default one, after what came before and before what comes next."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


def bare_capture(call: Callable, inputs: tuple):
    """(graph, outputs) of `call(*inputs)`, warmed up on a side stream. Nothing is looked for before."""
    with _side_stream():
        for _ in range(WARM_UPS):
            call(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*inputs)
    return graph, tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, outputs)


def _capture(call: Callable, inputs: tuple):
    """`bare_capture` after a look at what forbids it. Raises PerflabError for that, and for one that fails."""
    with _side_stream():
        found = forbids(call, *inputs)
    if found:
        more = f" ({len(found) - 1} more: see forbids)" if found[1:] else ""
        raise PerflabError(f"This cannot be captured: {found[0]}{more}.")
    here = torch.cuda.current_stream()
    try:
        return bare_capture(call, inputs)
    except Exception as e:
        said = first_line(e)
        torch.cuda.set_stream(here)  # a capture that fails leaves its own stream behind
        then = "this process goes on" if _mended() else "this process is spoiled: restart the kernel"
        raise PerflabError(f"The capture failed ({said}); {then}.") from None


def _mended() -> bool:
    """Give the random numbers of the device a new state where a failed capture still holds the old one."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    for attempt in range(2):
        try:
            torch.empty(1, device="cuda").normal_()
            torch.cuda.synchronize()
            return True
        except Exception:
            with contextlib.suppress(Exception):
                default = torch.cuda.default_generators[torch.cuda.current_device()]
                new = torch.Generator(device=default.device)
                new.manual_seed(default.initial_seed() + attempt + 1)
                default.graphsafe_set_state(new.graphsafe_get_state())
    return False


def capture(call: Callable, *inputs) -> Graph:
    """Capture `call(*inputs)` as a CUDA graph: tensors, or lists, tuples and dicts of them, in and out.

    What forbids a capture is looked for before, so that none fails in this process. The call runs a few
    times, on clones of the inputs; what it changes besides (running means of a normalisation) is changed.
    Capture a forward without a backward under torch.no_grad(). The outputs take part in no backward pass:
    see `capture_step`, or torch.cuda.make_graphed_callables.
    Raises PerflabError where there is no CUDA device, and for what cannot be captured, with its line.

    >>> capture(step)  # doctest: +SKIP
    """
    check_callable(call)
    _ready_for(inputs)
    static = copied(inputs)
    graph, outputs = _capture(call, static)
    return Graph(call, graph, static, outputs)


def capture_step(model: torch.nn.Module, loss: Callable, optimizer: torch.optim.Optimizer, *inputs) -> Graph:
    """Capture a training step: `loss(model(x), target)`, its backward and `optimizer`, for inputs x, target.

    `graph(x, target)` takes a step and returns the loss; gradients are left in the parameters. Warming up
    takes steps too; parameters, buffers and the optimizer's state are put back as they were. A learning
    rate that is a number stays what it was at the capture: give a tensor where it is to change.
    Raises PerflabError for an optimizer that cannot be captured, or whose first state is not known here.
    """
    _ready_for(inputs)
    _check_optimizer(optimizer)

    def step(*inputs):
        optimizer.zero_grad(set_to_none=True)  # so that the capture's backward makes gradients, and adds to none
        error = loss(model(*inputs[:-1]), inputs[-1])
        error.backward()
        optimizer.step()
        return error

    static = copied(inputs)
    with _put_back(model, optimizer):
        graph, outputs = _capture(step, static)
    return Graph(step, graph, static, outputs)


def _check_optimizer(optimizer: torch.optim.Optimizer):
    kind = type(optimizer).__name__
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        raise PerflabError(f"{kind} counts its steps on the host: build it as {kind}(..., capturable=True).")
    damped = kind == "SGD" and any(g["momentum"] and g["dampening"] for g in optimizer.param_groups)
    if not optimizer.state and (damped or kind not in _FROM_ZERO):
        raise PerflabError(f"The state that {kind} starts from is not known here: take one step with it before.")


@contextlib.contextmanager
def _put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Afterwards parameters, buffers and the optimizer's state are as before, and new state starts from zero.

    In place, since a graph knows addresses.
    """

    def tensors() -> list[torch.Tensor]:
        states = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return [*model.parameters(), *model.buffers(), *states]

    before = {x: x.detach().clone() for x in tensors()}
    try:
        yield
    finally:
        with torch.no_grad():
            for x in tensors():
                x.copy_(before[x]) if x in before else x.zero_()


def listing(training: bool) -> dict[str, str]:
    """The source's listing of a CUDA graph as it stands, in a process of its own, and what came of it.

    Columns: captured (yes, no), results (right, wrong, none) against the same without a graph, process
    (goes on, spoiled) by whether another model can be made after, error (its first line, or "none").
    training: backward and optimizer stand inside the capture as well.
    Raises PerflabError where there is no CUDA device.
    """
    _ready_for(())
    return process.call(_as_it_stands, training)


def _as_it_stands(training: bool) -> dict[str, str]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    static_input, new = torch.randn(2, 16, 64, device="cuda").unbind()

    def step(model, optimizer, x):
        out = model(x)
        if training:
            out.square().mean().backward()
            optimizer.step()
        return out

    outcome = {"captured": "no", "results": "none", "process": "goes on", "error": "none"}
    try:
        for _ in range(3):
            model(static_input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_out = step(model, optimizer, static_input)
        outcome["captured"] = "yes"
        static_input.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = step(twin, twin_optimizer, new)
        pairs = [(static_out, expected), *zip(model.parameters(), twin.parameters(), strict=True)]
        same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
        outcome["results"] = "right" if same else "wrong"
    except Exception as e:
        outcome["error"] = first_line(e)
    try:
        torch.nn.Linear(8, 8, device="cuda")
        torch.cuda.synchronize()
    except Exception:
        outcome["process"] = "spoiled"
    return outcome
