"""Where the host waits for the device, and what else forbids a CUDA graph, each with its line of the caller's code.

Two modes of torch see every operator and function before it runs, so that the same lines are found without a
device: there they are the ones that would wait. Timing has no place here, since a mode slows each operator.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from perflab.bench.code import Place, caller, frames, is_instrument

from .dispatch import check_callable

HOST = {"cpu", "meta"}
STAGED_BYTES = 64 * 2**10  # a pageable copy beyond it waits for its stream (CUDA runtime, API synchronization behavior)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
_WARNS = "synchronizing CUDA operation"  # of torch.cuda.set_sync_debug_mode

_READS = "the host waits for a number from the device, and a replay would not look at it again"
_SHAPE = "the size of its result depends on the data, so the host waits for it"
_COPY = "the host waits for the copy"
_DEVICE = "the host waits for the device"
_FROM_HOST = "its data come from the host, and a replay would not read them again"
_SEED = "a replay would not move the state of the generator again"

# Operators that wait, and why. Source: the constraints in "CUDA semantics", section "CUDA Graphs", of torch's
# notes, and what torch.cuda.set_sync_debug_mode warns of.
OPERATORS = {
    **dict.fromkeys(["_local_scalar_dense", "equal", "allclose"], _READS),
    **dict.fromkeys(["nonzero", "masked_select", "bincount", "histogram"], _SHAPE),
    **dict.fromkeys(["_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"], _SHAPE),
    "repeat_interleave": "without output_size the host waits for the size of its result",
    "_linalg_check_errors": "the host reads whether it succeeded",
}
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Functions that reach no operator where the tensor is on the host already, or hide theirs from every mode.
FUNCTIONS = {**dict.fromkeys(["tolist", "numpy", "__array__", "__repr__", "__format__"], _READS), "cpu": _COPY}
# Calls that are neither operators nor functions of a tensor: (owner, name, why, do they wait).
CALLS = [
    *((owner, "synchronize", _DEVICE, True) for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)),
    *((torch.cuda, name, _SEED, False) for name in ("manual_seed", "get_rng_state", "set_rng_state")),
    (torch, "manual_seed", _SEED, False),
]
_WRITTEN = {  # as the caller writes it
    "__bool__": "bool() or if on a tensor",
    "__float__": "float() of a tensor",
    "__int__": "int() of a tensor",
    "__index__": "a tensor as a number",
    "__format__": "a tensor in a text",
    "__repr__": "print or str of a tensor",
    "__getitem__": "a boolean mask as index",
    "__setitem__": "a boolean mask as index",
    "_local_scalar_dense": ".item()",
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "fn": "unique",  # torch.unique and unique_consecutive, as torch wraps them
}


@dataclass(frozen=True)
class Sync:
    """One line at which the host waits: the operator it stands for first, how often, and all their names."""

    operator: str
    place: Place
    count: int
    names: tuple[str, ...]

    def __repr__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.place}: {self.place.code or '(source not at hand)'}  [{self.operator}{times}]"


@dataclass(frozen=True)
class Forbidden:
    """One thing that cannot be captured: the operator as it is written, why, and where in the caller's code."""

    operator: str
    why: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operator} ({self.place}): {self.why}"


def host_syncs(step: Callable[[], object]) -> list[Sync]:
    """Where `step()` makes the host wait for the device, in the order in which it happens first.

    `step` runs twice: once unobserved, so that what happens only the first time is left out. On tensors of
    a CUDA device, torch's own set_sync_debug_mode is a second witness, for what no operator tells. Where
    all tensors are on the CPU, nothing waits: the lines are those that would on a device.
    Raises PerflabError where `step` is no function.

    >>> len(host_syncs(lambda: torch.ones(3).sum().item()))
    1
    """
    check_callable(step)
    step()
    watch = _Watch()
    with _second_witness(watch), _watching(watch):
        step()
    names_by_place: dict[Place, list[str]] = {}
    for event in watch.events:
        if event.waits and (event.on_device or not watch.on_device):
            names_by_place.setdefault(event.place, []).append(event.name)
    return [Sync(names[0], place, len(names), tuple(dict.fromkeys(names))) for place, names in names_by_place.items()]


def forbids(call: Callable, *inputs) -> list[Forbidden]:
    """What in `call(*inputs)` forbids a CUDA graph. Runs the call twice, on clones of the input tensors.

    What the call changes besides its inputs (parameters, buffers) is changed by these runs; what was
    compiled runs eager. An empty list does not promise a capture: a library may refuse what no operator
    shows. An error of the call itself is raised as it is.
    """
    check_callable(call)
    with torch.compiler.set_stance("force_eager"):
        for watch in (_Watch(), _Watch()):  # what only a first call does is not captured
            with _watching(watch):
                call(*copied(inputs))
    found: dict[tuple[str, Place], Forbidden] = {}
    for event in watch.events:
        found.setdefault((event.written, event.place), Forbidden(event.written, event.why, event.place))
    return list(found.values())


def copied(inputs):
    """The same inputs, each tensor a clone that is a leaf."""
    return tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x, inputs)


# -- what is seen


@dataclass(frozen=True)
class _Event:
    """Something that waits or cannot be captured: its name for torch, as it is written, why, and where."""

    name: str
    written: str
    why: str
    place: Place
    waits: bool
    on_device: bool


class _Watch:
    """What happened while a call was watched, in order; what was on the host only is told apart."""

    def __init__(self):
        self.events: list[_Event] = []
        self.on_device = self.muted = False
        self.function = ""  # of torch, that the caller wrote and that runs
        self._thread = threading.get_ident()
        self._copies: dict[int, torch.UntypedStorage] = {}  # kept alive, or an address would be another tensor's

    def add(self, name: str, written: str, why: str, waits: bool, on_device: bool):
        if not self.muted:
            waits = waits and (on_device or not _reads_own_counter())
            written = _WRITTEN.get(written, written)
            self.events.append(_Event(name, written, why, caller(self._thread), waits, on_device))

    def add_unnamed(self):
        """A wait that torch tells of: new only where no operator told of one at that place."""
        here = caller(self._thread)
        if not any(event.place == here and event.on_device and event.waits for event in self.events):
            self.events.append(_Event("a synchronising CUDA call", "", "", here, True, True))

    def is_copy(self, x: torch.Tensor) -> bool:
        """Was x made by .cpu() of a CPU tensor, or from such copies? On a device it would be on the host too."""
        return x.layout == torch.strided and x.untyped_storage()._cdata in self._copies

    def add_copy(self, x):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            self._copies[x.untyped_storage()._cdata] = x.untyped_storage()


class _Operators(TorchDispatchMode):
    def __init__(self, watch: _Watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs, watch = kwargs or {}, self.watch
        with self:  # under inference_mode an operator that is made of others arrives whole
            result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        devices = {x.device.type for x in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        on_device = not devices <= HOST
        on_copies = bool(tensors) and not on_device and all(map(watch.is_copy, tensors))
        watch.on_device |= on_device
        name = operator.overloadpacket.__name__
        why, waits = _judged(name, args, kwargs)
        if why and not on_copies:
            watch.add(f"aten.{name}", watch.function or name, why, waits, on_device)
        result = operator(*args, **kwargs)
        if on_copies:
            for x in tree_leaves(result):
                watch.add_copy(x)
        return result


class _Functions(TorchFunctionMode):
    """Keeps the name of the function that the caller wrote, and sees those that reach no operator.

    On a device `.cpu()` makes a copy, which is on the host from then on; so it does here, to tell the two apart.
    """

    def __init__(self, watch: _Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, watch = kwargs or {}, self.watch
        name = getattr(function, "__name__", str(function))
        x = args[0] if args and torch.is_tensor(args[0]) else None
        on_host = x is not None and x.device.type in HOST
        outer, watch.function = (watch.function, watch.muted), name
        if x is None:
            if name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
                watch.add(f"torch.{name}", name, _FROM_HOST, False, False)
        elif name in FUNCTIONS and not watch.is_copy(x):
            watch.add(f"Tensor.{name}", name, FUNCTIONS[name], True, not on_host)
            watch.muted = True
        elif name == "one_hot":  # with its classes given, it looks at the values of CPU tensors alone
            classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
            watch.muted = classes != -1
        try:
            result = function(*args, **kwargs)
        finally:
            watch.function, watch.muted = outer
        if name == "cpu" and on_host:
            result = result.clone()
            watch.add_copy(result)
        return result


@contextlib.contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Operators, functions and the calls that are neither: torch is as it was afterwards."""
    with contextlib.ExitStack() as put_back:
        for owner, name, why, waits in CALLS:
            original = getattr(owner, name)
            put_back.callback(setattr, owner, name, original)
            setattr(owner, name, _told(watch, original, f"{owner.__name__}.{name}", why, waits))
        with _Operators(watch), _Functions(watch):
            yield


def _told(watch: _Watch, original: Callable, name: str, why: str, waits: bool) -> Callable:
    def call(*args, **kwargs):
        watch.add(name, f"{original.__name__}()", why, waits, True)
        if waits and not torch.cuda.is_initialized():
            return None
        return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def _second_witness(watch: _Watch) -> Iterator[None]:
    """torch's own warnings of synchronising calls, where a device is in use; other warnings go on their way."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message, *args, **kwargs):
            if _WARNS in str(message):
                watch.add_unnamed()
            else:
                shown(message, *args, **kwargs)

        warnings.filterwarnings("always", message=f".*{_WARNS}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


# -- operators


def _judged(name: str, args: tuple, kwargs: dict) -> tuple[str, bool]:
    """Why this operator cannot be captured, or "", and whether it makes the host wait."""
    if name in INDEXED:
        why = _why_indexed(args)
        return why, bool(why)
    if name in ("_to_copy", "copy_"):
        return _why_copied(name, args, kwargs)
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return "", False
    if name in OPERATORS:
        return OPERATORS[name], True
    if name == "lift_fresh" and args[0].is_cuda:
        return _FROM_HOST, False
    if isinstance(kwargs.get("generator"), torch.Generator):
        return "the graph does not know a generator of your own: graph.register_generator_state would tell it", False
    return "", False


def _why_indexed(args: tuple) -> str:
    indices = [index for index in args[1] if index is not None]
    # x[mask] = number becomes masked_fill, which keeps its size
    fills = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    if not fills and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return _SHAPE
    return _COPY if args[0].is_cuda and not all(index.is_cuda for index in indices) else ""


def _why_copied(name: str, args: tuple, kwargs: dict) -> tuple[str, bool]:
    """Of copies between host and device, only one from pinned memory that does not block can be captured."""
    if name == "copy_":
        target, source = args[0].device, args[1]
        late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        target, source = torch.device(kwargs.get("device") or args[0].device), args[0]
        late = kwargs.get("non_blocking", False)
    if (target.type in HOST) == (source.device.type in HOST):
        return "", False
    if target.type in HOST:
        return "a copy from the device to the host waits, or is read too early", not late
    if late and source.is_pinned():
        return "", False
    return "a copy from pageable memory to the device waits", not late or source.nbytes > STAGED_BYTES


def _reads_own_counter() -> bool:
    """Is it an optimizer that reads its step counter? On a device that counter stays on the CPU."""
    for frame in frames(sys._getframe()):
        file = frame.f_code.co_filename
        if not is_instrument(file):
            return False
        if file.startswith(_OPTIMIZERS) and frame.f_code.co_name == "_get_value":
            return True
    return False
