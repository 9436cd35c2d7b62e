"""Operators that make the host wait for the device, each with the line of the learner's own code.

A dispatch mode sees every operator before it runs, so that the same lines are found without a device: there
they are the ones that would wait. Timing has no place here, since a mode slows each operator many times.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench.code import Place, caller, frames, is_instrument

from .dispatch import check_callable

_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
HOST = ("cpu", "meta")
_WARNS = "synchronizing CUDA operation"  # of torch.cuda.set_sync_debug_mode

# The size of what they return, or a Python number, depends on values that are on the device.
VALUES = frozenset(["_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount"])
VALUES |= {"repeat_interleave", "_linalg_check_errors", "_unique", "_unique2", "unique_dim"}
VALUES |= {"unique_consecutive", "unique_dim_consecutive"}
MASKS = frozenset(["index", "index_put", "index_put_", "_index_put_impl_"])  # by a boolean mask: nonzero inside
COPIES = frozenset(["_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"])
CALLS = frozenset(["cpu", "tolist", "numpy", "__array__"])  # of a CPU tensor no operator tells of them
SHOWN = frozenset(["__repr__", "__format__"])  # torch hides what it runs for them from every mode
STAGED_BYTES = 64 * 2**10  # a pageable copy beyond it waits for its stream (CUDA runtime, API synchronization behavior)


@dataclass(frozen=True)
class Sync:
    """One line at which the host waits: the operator it stands for first, how often, and all their names.

    `file` is "cell" for a notebook's cell, else the path; `code` is the line itself where it can be read.
    """

    operator: str
    file: str
    line: int
    count: int
    names: tuple[str, ...] = ()
    code: str = ""

    @property
    def place(self) -> str:
        return str(Place(self.file, self.line))

    def __str__(self):
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.place}: {self.code or '(source not at hand)'}  [{self.operator}{times}]"

    __repr__ = __str__


def waits(operator, args: tuple, kwargs: dict) -> bool:
    """Does this operator, with these arguments, make the host wait for the device (or would it, on one)?"""
    name = operator.overloadpacket.__name__
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in VALUES:
        return True
    if name in MASKS:
        return _masks(name, args, kwargs)
    return name in COPIES and _copies(name, args, kwargs)


def host_syncs(step: Callable[[], object]) -> list[Sync]:
    """Where `step()` makes the host wait for the device, in the order in which it happens first.

    `step` runs twice: once unobserved, so that what happens only the first time is left out. On tensors of
    a CUDA device, torch's own set_sync_debug_mode is a second witness, for what no operator tells. Where
    all tensors are on the CPU, nothing waits: the lines are those that would on a device.
    Raises PerflabError when `step` cannot be called without arguments.

    >>> len(host_syncs(lambda: torch.ones(3).sum().item()))
    1
    """
    check_callable(step)
    step()
    seen = _Waits()
    with _second_witness(seen), _Operators(seen), _Calls(seen), _explicit(seen):
        step()
    return seen.lines()


class _Waits:
    """What was seen, by place, for real devices and for the CPU apart."""

    def __init__(self):
        self.owner = threading.get_ident()
        self.on_device = self.deaf = False
        self.copies: dict[int, torch.UntypedStorage] = {}  # made by .cpu() of CPU tensors, and from such copies
        self.found: dict[tuple[bool, str, int], list] = {}

    def copied(self, x):
        """Keep it alive as well, or its place in memory would be another tensor's."""
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            self.copies[x.untyped_storage()._cdata] = x.untyped_storage()

    def is_copy(self, x: torch.Tensor) -> bool:
        return x.layout == torch.strided and x.untyped_storage()._cdata in self.copies

    def add(self, name: str, real: bool):
        if self.deaf:
            return
        here = caller(self.owner)
        self.found.setdefault((real, here.file, here.line), [here.code]).append(name)

    def witnessed(self):
        """A wait that torch tells of: new only where no operator told of it at that place."""
        here = caller(self.owner)
        self.found.setdefault((True, here.file, here.line), [here.code, "a synchronising CUDA call"])

    def lines(self) -> list[Sync]:
        return [
            Sync(names[0], file, line, len(names), tuple(dict.fromkeys(names)), code)
            for (real, file, line), (code, *names) in self.found.items()
            if real or not self.on_device
        ]


class _Operators(TorchDispatchMode):
    def __init__(self, seen: _Waits):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = list(_tensors(args))
        real = any(t.device.type not in HOST for t in tensors) or _target(kwargs) not in (None, *HOST)
        here = bool(tensors) and all(map(self.seen.is_copy, tensors))
        self.seen.on_device |= real
        if waits(func, args, kwargs) and (real or not (here or _own_counter())):
            self.seen.add(f"aten.{func.overloadpacket.__name__}", real)
        out = func(*args, **kwargs)
        if here and not real:
            for x in tree_leaves(out):
                self.seen.copied(x)
        return out


class _Calls(TorchFunctionMode):
    """`.cpu()`, `.numpy()`, print of a CPU tensor: no operator tells of them, on a device each would wait.

    On a device `.cpu()` makes a copy, which is on the host from then on; so it does here, to tell the two apart.
    """

    def __init__(self, seen: _Waits):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if x is None:
            return func(*args, **kwargs)
        real = x.device.type not in HOST
        told = (name in CALLS and not real) or (name in SHOWN and (x.dim() > 0 or name == "__repr__"))
        if told and not self.seen.is_copy(x):
            self.seen.add(f"Tensor.{name}", real)
        self.seen.deaf = name == "one_hot" and not real and (args[1:2] or (kwargs.get("num_classes", -1),)) != (-1,)
        try:
            out = func(*args, **kwargs)
            if name == "cpu" and not real:
                out = out.clone()
                self.seen.copied(out)
        finally:
            self.seen.deaf = False  # with its classes given, one_hot looks at the values of CPU tensors alone
        return out


@contextlib.contextmanager
def _explicit(seen: _Waits):
    """torch.cuda.synchronize() is no operator: it is watched while `step` runs."""
    plain = torch.cuda.synchronize

    def watched(*args, **kwargs):
        seen.add("torch.cuda.synchronize", real=True)
        return plain(*args, **kwargs)

    torch.cuda.synchronize = watched
    try:
        yield
    finally:
        torch.cuda.synchronize = plain


@contextlib.contextmanager
def _second_witness(seen: _Waits):
    """torch's own warnings of synchronising calls, where a device is in use; other warnings go on their way."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message, *args, **kwargs):
            if _WARNS in str(message):
                seen.witnessed()
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


def _masks(name: str, args: tuple, kwargs: dict) -> bool:
    """Indexing by a boolean mask; the assignment of one number to a mask is a masked_fill, and waits for nothing."""
    indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
    if not any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return False
    value = args[2] if len(args) > 2 else kwargs.get("values")
    return name == "index" or value is None or value.numel() != 1


def _copies(name: str, args: tuple, kwargs: dict) -> bool:
    """A copy between host and device that is not asked to be asynchronous, or cannot be: pageable memory."""
    target, source = (args[0], args[1]) if name.startswith(("copy_", "_copy_from")) else (None, args[0])
    goes_to = target.device.type if target is not None else _target(kwargs) or source.device.type
    if (source.device.type == "cpu") == (goes_to == "cpu"):
        return False
    if source.device.type == "cpu" and source.nbytes > STAGED_BYTES and not source.is_pinned():
        return True
    return not kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)


def _target(kwargs: dict) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _tensors(args):
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


# -- frames


def _own_counter() -> bool:
    """Is it an optimizer that reads its step counter? On a device that counter stays on the CPU."""
    for frame in frames(sys._getframe()):
        file = frame.f_code.co_filename
        if not is_instrument(file):
            return False
        if file.startswith(_OPTIMIZERS) and frame.f_code.co_name == "_get_value":
            return True
    return False
