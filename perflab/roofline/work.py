"""What an operator or a model does, counted and not timed: FLOPs, bytes moved, and what could not be counted.

Floating-point operations of matrix products, convolutions and attention are torch's own count
(FlopCounterMode); those of other operators follow the table of `arithmetic`. Bytes are the sizes of what each
operator reads and writes. Nothing may be timed in here: counting slows code many times over.
"""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench.units import digits, quantity
from perflab.errors import PerflabError

from . import flops

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize", "set"}
_OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "set"}
_READS_ONLY = {"_local_scalar_dense", "equal", "item", "is_nonzero"}
_PICKS = {"embedding", "index_select", "gather", "index", "_unsafe_index", "nll_loss_forward", "nll_loss2d_forward"}
_PUTS = {"index_put", "scatter", "scatter_add", "index_add", "index_copy"}


@dataclass(frozen=True)
class OperatorWork:
    """All calls of one operator together."""

    calls: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: "OperatorWork") -> "OperatorWork":
        return OperatorWork(
            self.calls + other.calls,
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    @property
    def moved_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; nan where nothing moves."""
        return self.flops / self.moved_bytes if self.moved_bytes else math.nan


@dataclass(frozen=True)
class Work(OperatorWork):
    """The work of one call: FLOPs, bytes read and written, FLOPs per byte moved (`intensity`).

    The bytes are summed over operators, as if each fetched its inputs from memory and put its outputs
    back: the traffic without fusion and without caches. `unknown` names operators whose FLOPs are not in
    `flops`, with the reason. `operators` is the same by operator.
    """

    unknown: tuple[str, ...] = ()
    operators: dict[str, OperatorWork] = field(default_factory=dict)

    def table(self):
        """A pandas DataFrame, a row an operator: calls, flops, bytes_read, bytes_written, intensity."""
        import pandas as pd

        ordered = sorted(self.operators.items(), key=lambda item: (-item[1].moved_bytes, item[0]))
        columns = ["operator", "calls", "flops", "bytes_read", "bytes_written", "intensity"]
        return pd.DataFrame(
            [{"operator": name, **vars(o), "intensity": o.intensity} for name, o in ordered], None, columns
        )

    def __repr__(self):
        """Work of 1 operator: 275 GFLOP, intensity 683 FLOP/byte
        reads 256 MiB, writes 128 MiB
        """
        flops = f"{self.flops:,} FLOP" if self.flops < 1e6 else quantity(self.flops, "flops")
        plural = "s" * (self.calls != 1)
        lines = [
            f"Work of {self.calls:,} operator{plural}: {flops}, intensity {digits(self.intensity)} FLOP/byte",
            f"  reads {quantity(self.bytes_read, 'bytes')}, writes {quantity(self.bytes_written, 'bytes')}",
        ]
        return "\n".join([*lines, *(f"  not in the FLOPs: {what}" for what in self.unknown)])


def counted(call: Callable, *inputs, **options) -> Work:
    """Run `call(*inputs, **options)` once and count its work; forward, backward and optimizer, whatever it does.

    Causal masks are not discounted, workspaces of libraries and what they repack are not seen, and code
    that torch.compile made runs eager for the time of the count. A step that changes parameters does change
    them. Raises PerflabError where no operator was seen, as inside a CUDA graph.

    >>> counted(torch.mm, torch.ones(8, 8), torch.ones(8, 8)).flops
    1024
    """
    seen = Counting()
    products = flop_counter.FlopCounterMode(display=False, custom_mapping=_missing_formulas())
    with _eager(), seen, products:
        call(*inputs, **options)
    if not seen.operators:
        raise PerflabError("counted saw no operator: give it the eager model or function, not one captured in a graph.")
    for packet, n in products.get_flop_counts().get("Global", {}).items():
        name = str(packet)
        if name in seen.operators:
            seen.operators[name] += OperatorWork(flops=int(n))
    known = {str(packet) for packet in products.flop_registry}
    unknown = (
        f"{name}, {n} call{'s' * (n != 1)}: no formula for it"
        for name, n in sorted(seen.without.items())
        if name not in known
    )
    total = sum(seen.operators.values(), OperatorWork())
    return Work(**vars(total), unknown=tuple(unknown), operators=seen.operators)


def _missing_formulas() -> dict:
    """Formulas for attention on CPU, which torch lacks before 2.15 and then counts as nothing.

    They are torch's own, those of its other attention kernels: the two matrix products, and five backward.
    """
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {
        kernel: lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v),
        f"{kernel}_backward": lambda grad, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(grad, q, k, v),
    }
    packets = {getattr(torch.ops.aten, name): formula for name, formula in formulas.items()}
    return {packet: formula for packet, formula in packets.items() if packet not in flop_counter.flop_registry}


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs as it was written: counted inside a compiled graph, it would stay slow afterwards."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def distinct_bytes(t: torch.Tensor) -> int:
    """Bytes of memory that a tensor addresses: an expanded dimension counts once, overlapping windows once."""
    dimensions = _dimensions(t)
    span = 1 + sum((size - 1) * step for step, size in dimensions)
    return min(math.prod(size for _, size in dimensions), span) * t.element_size() if t.numel() else 0


def _dimensions(t: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(stride, size) of what a tensor addresses, the same for its transposes and reshaped views."""
    merged: list[tuple[int, int]] = []
    pairs = zip(t.stride(), t.shape, strict=True)
    for step, size in sorted((pair for pair in pairs if pair[0] and pair[1] > 1), reverse=True):
        inside = bool(merged) and merged[-1][0] == step * size  # it fills the steps of the one before
        merged.append((step, size * merged.pop()[1] if inside else size))
    return tuple(merged)


def _storage(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise PerflabError(f"The bytes of a {kind} tensor are not known here: take the part with dense tensors alone.")
    return t.untyped_storage()._cdata


def views_of(some: Iterable[torch.Tensor]) -> dict[tuple, int]:
    """The distinct pieces of memory that tensors address, with their bytes: `x + x` and `x @ x.t()` read x once."""
    return {(_storage(t), t.storage_offset(), _dimensions(t)): distinct_bytes(t) for t in some}


class Counting(TorchDispatchMode):
    """Sees each operator below autograd and autocast, with its real inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.operators: dict[str, OperatorWork] = {}
        self.without: Counter[str] = Counter()  # calls of operators that the table of FLOPs does not hold

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self.without[str(func)] += 1
        elif func.namespace != "profiler":
            moved = traffic(func, args, kwargs, out)
            if moved is not None:
                self._add(str(func._overloadpacket), args, kwargs, tensors(out), moved)
        return out

    def _add(self, name: str, args, kwargs, outputs: list[torch.Tensor], moved: tuple[int, int]):
        touched = [*tensors([args, kwargs]), *outputs]
        done = 0
        if any(t.is_complex() for t in touched):
            self.without[f"{name} of complex numbers"] += 1
        if any(t.is_floating_point() for t in touched):
            done = flops.flops_of(name, args, kwargs, outputs)
            if done is None:
                self.without[name] += 1
        self.operators[name] = self.operators.get(name, OperatorWork()) + OperatorWork(1, done or 0, *moved)


def traffic(func, args, kwargs, out) -> tuple[int, int] | None:
    """Bytes that one operator reads and writes; None for a view, or a question about a shape."""
    name = flops.base_name(str(func._overloadpacket))
    inputs, outputs = tensors([args, kwargs]), tensors(out)
    made = made_by(inputs, outputs)
    changed, overwritten = _changed(func, args, kwargs)
    if not made and not changed and (outputs or name not in _READS_ONLY):
        return None
    if name in _ALLOCATES:
        return 0, 0
    if name in _OVERWRITES:
        overwritten = changed
    reads = views_of(t for t in inputs if not any(t is o for o in overwritten))
    writes = views_of([*made, *changed])
    if name.endswith("_like") or name.startswith("new_"):  # these look at a shape only
        reads = {}
    elif name in _PICKS:  # no more of the first input is read than is picked from it
        indices = [t for t in inputs if not t.is_floating_point()]
        picked = max(t.numel() for t in [*outputs, *indices])
        first = next(iter(reads))
        reads[first] = min(reads[first], picked * inputs[0].element_size())
    elif name in _PUTS:
        put = max((t.nbytes for t in inputs[1:]), default=0)
        writes = {view: min(n, put) for view, n in writes.items()}
    return sum(reads.values()), sum(writes.values())


def made_by(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs that have memory of their own: of a view, none."""
    ours = {_storage(t) for t in inputs}
    return [t for t in outputs if _storage(t) not in ours]


def tensors(x) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and mappings."""
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def _changed(func, args, kwargs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator writes into, by its schema; and those of them that it does not read."""
    changed, overwritten = [], []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = tensors(args[k] if k < len(args) else kwargs.get(argument.name))
            changed += written
            overwritten += written if argument.kwarg_only else []
    return changed, overwritten
