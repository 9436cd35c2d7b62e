"""What forbids a CUDA graph, found on any machine: which operator, in which line of the caller's own code.

A capture that fails may spoil its process, so it is refused before: the call runs once while every operator
is looked at. Nothing here captures in this process.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from perflab.bench.code import Place, caller
from perflab.bench.plan import Job, Plan
from perflab.bench.process import fresh
from perflab.errors import PerflabError

from .dispatch import check_callable


@dataclass(frozen=True)
class Forbidden:
    """One thing that cannot be captured: the operator, why, and where in the caller's code."""

    operator: str
    why: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operator} ({self.place}): {self.why}"


_READS = "the host waits for a number from the device, and a replay would not look at it again"
_SHAPE = "the size of its result depends on the data, so the host waits for it"
_COPY = "the host waits for the copy"
_WAIT = "the host waits for the device"
# Operators that wait for the device. Source: the constraints in "CUDA semantics", section "CUDA Graphs", of
# torch's notes, and what torch.cuda.set_sync_debug_mode warns of.
_OPERATORS = {
    "_local_scalar_dense": _READS,
    "is_nonzero": _READS,
    "equal": _READS,
    "allclose": _READS,
    "_linalg_check_errors": "the host reads whether it succeeded",
    **dict.fromkeys(["nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "histogram"], _SHAPE),
    **dict.fromkeys(["_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"], _SHAPE),
}
# What reaches no operator where the tensor is on the host already, as it is without a device.
_FUNCTIONS = {"tolist": _READS, "numpy": _READS, "__array__": _READS, "__repr__": _READS, "cpu": _COPY}
_SAID = {
    "__bool__": "bool() or if on a tensor",
    "__float__": "float() of a tensor",
    "__int__": "int() of a tensor",
    "__index__": "a tensor as a number",
    "__format__": "a tensor in a text",
    "__repr__": "print or str of a tensor",
    "_local_scalar_dense": ".item()",
    "__getitem__": "a boolean mask as index",
    "__setitem__": "a boolean mask as index",
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "fn": "unique",  # torch.unique and unique_consecutive, as torch wraps them
}
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class _Functions(TorchFunctionMode):
    """Keeps the name of the function that the caller wrote, and sees those that reach no operator."""

    def __init__(self, watch: "CaptureWatch"):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        outer, self.watch.function = self.watch.function, name
        try:
            if name in _FUNCTIONS and args and torch.is_tensor(args[0]):
                self.watch.forbid(_FUNCTIONS[name])
            elif name in ("tensor", "as_tensor") and kwargs.get("device") is not None and not torch.is_tensor(args[0]):
                self.watch.forbid("its data come from the host, and a replay would not read them again")
            return function(*args, **kwargs)
        finally:
            self.watch.function = outer


class CaptureWatch(TorchDispatchMode):
    """Looks at the operators of a call and keeps what cannot be captured, each operator and line once."""

    def __init__(self):
        super().__init__()
        self.found: list[Forbidden] = []
        self.seen: list[tuple] = []  # operator and sizes of its tensors, to compare two calls
        self.function = ""
        self._thread = threading.get_ident()
        self._functions = _Functions(self)

    def forbid(self, why: str, operator: str = ""):
        here = caller(self._thread)
        place = Place(Path(here.file).name, here.line)
        operator = operator or _SAID.get(self.function, self.function)
        if not any(f.place == place and f.operator == operator for f in self.found):
            self.found.append(Forbidden(operator, why, place))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op._schema.name.removeprefix("aten::")
        for why in _reasons(name, args, kwargs):
            self.forbid(why, _SAID.get(self.function, self.function) or _SAID.get(name, name))
        self.seen.append((name, *(tuple(x.shape) for x in tree_flatten(args)[0] if torch.is_tensor(x))))
        return op(*args, **kwargs)

    def __enter__(self):
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in _waits()]
        for owner, name, original in self._originals:
            setattr(owner, name, self._reported(original, name))
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error):
        self._functions.__exit__(*error)
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        return super().__exit__(*error)

    def _reported(self, original: Callable, name: str) -> Callable:
        def instead(*args, **kwargs):
            if name == "synchronize":
                self.forbid(_WAIT, "synchronize()")
                return original(*args, **kwargs) if torch.cuda.is_initialized() else None
            self.forbid("a replay would not move the state of the generator again", f"{name}()")
            return original(*args, **kwargs)

        return instead


def _waits() -> list[tuple[object, str]]:
    """What waits for the device or moves random state without an operator that could be seen."""
    waits = [(owner, "synchronize") for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)]
    seeds = [(torch, "manual_seed"), (torch.cuda, "manual_seed")]
    return [*waits, *seeds, (torch.cuda, "get_rng_state"), (torch.cuda, "set_rng_state")]


def _reasons(name: str, args, kwargs) -> Iterator[str]:
    """Why this operator cannot be captured."""
    if name in _OPERATORS:
        yield _OPERATORS[name]
    elif name in _INDEXED:
        indices = [i for i in args[1] if i is not None]
        # x[mask] = number becomes masked_fill, which keeps its size
        fills = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not fills:
            yield _SHAPE
        elif args[0].is_cuda and any(not i.is_cuda for i in indices):
            yield _COPY
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        yield "without output_size the host waits for the size of its result"
    elif name in ("_to_copy", "copy_"):
        yield from _copy_reasons(name, args, kwargs)
    elif name == "lift_fresh" and args[0].is_cuda:
        yield "its data come from the host, and a replay would not read them again"
    elif isinstance(kwargs.get("generator"), torch.Generator):
        yield "the graph does not know a generator of your own: graph.register_generator_state would tell it"


def _copy_reasons(name: str, args, kwargs) -> Iterator[str]:
    """Of copies between host and device, only one from pinned memory that does not block can be captured."""
    if name == "copy_":
        into, source = args[0].device.type, args[1]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    else:
        source, blocks = args[0], not kwargs.get("non_blocking")
        into = torch.device(kwargs.get("device") or source.device).type
    if {into, source.device.type} == {"cpu", "cuda"}:
        if into == "cpu":
            yield "a copy from the device to the host waits, or is read too early"
        elif blocks or not source.is_pinned():
            yield "a copy from pageable memory to the device waits"


def copied(inputs):
    """The same inputs, each tensor a clone that is a leaf."""
    return tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x, inputs)


def _watched(call: Callable, inputs, runs: int) -> list[CaptureWatch]:
    """Watches of `runs` calls, after one that is forgotten: what only a first call does is not captured."""
    watches = [CaptureWatch() for _ in range(1 + runs)]
    with torch.compiler.set_stance("force_eager"):
        for watch in watches:
            with watch:
                call(*copied(inputs))
    return watches[1:]


def forbids(call: Callable, *inputs) -> list[Forbidden]:
    """What in `call(*inputs)` forbids a CUDA graph. Runs the call twice, on clones of the input tensors.

    What the call changes besides its inputs (parameters, buffers) is changed by these runs; what was
    compiled runs eager. An empty list does not promise a capture: a library may refuse what no operator
    shows. An error of the call itself is raised as it is.
    """
    check_callable(call)
    (watch,) = _watched(call, inputs, 1)
    return watch.found


def apart(observed: Callable[[], dict], timeout_s: float = 120.0) -> dict:
    """What `observed()` returns, from a process of its own that it may spoil: a dict of numbers and text.

    Raises PerflabError with the reason where that process died, was silent too long, or could not start.
    """
    once = Plan(enough_rounds=1, most_rounds=1, budget_s=0.0, patience_s=0.0, least_rounds=1, sample_s=0.0)
    job = Job("apart", 1, "what", {"it": observed}, run=bool, prepare=lambda f: f(), counts=dict, plan=once)
    result = fresh(timeout_s)(job)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    if why := result.reasons.get("it"):
        raise PerflabError(f"A process of its own did not bring it to an end: {why}.")
    return result.counts["it"]
