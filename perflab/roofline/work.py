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
from dataclasses import dataclass, field, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench.units import digits, quantity
from perflab.errors import PerflabError
from perflab.launch import given

from . import flops

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize", "set"}
_OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "set"}
_READS_ONLY = {"_local_scalar_dense", "equal", "item", "is_nonzero"}
_PICKS = {"embedding", "index_select", "gather", "index", "_unsafe_index", "nll_loss_forward", "nll_loss2d_forward"}
_PUTS = {"index_put", "scatter", "scatter_add", "index_add", "index_copy"}


@dataclass(frozen=True)
class Operator:
    """All calls of one operator together."""

    calls: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; nan where nothing moves."""
        return self.flops / self.moved_bytes if self.moved_bytes else math.nan


@dataclass(frozen=True)
class Work(Operator):
    """The work of one call: FLOPs, bytes read and written, FLOPs per byte moved (`intensity`).

    The bytes are summed over operators, as if each fetched its inputs from memory and put its outputs
    back: the traffic without fusion and without caches. `fused_bytes` is the other end: what comes from
    outside, read once, and what is left at the end (results, gradients, changed parameters), written once.
    `unknown` names operators whose FLOPs are not in `flops`, with the reason. `operators` is the same by
    operator.
    """

    unknown: tuple[str, ...] = ()
    fused_bytes: int = 0
    operators: dict[str, Operator] = field(default_factory=dict)

    @property
    def fused_intensity(self) -> float:
        """FLOPs per byte if all operators were one: the most that fusion can reach."""
        return self.flops / self.fused_bytes if self.fused_bytes else math.nan

    def table(self):
        """A pandas DataFrame, a row an operator: calls, flops, bytes_read, bytes_written, intensity."""
        import pandas as pd

        rows = [(name, o.calls, o.flops, o.bytes_read, o.bytes_written, o.intensity) for name, o in self._sorted()]
        columns = ["operator", "calls", "flops", "bytes_read", "bytes_written", "intensity"]
        return pd.DataFrame(rows, columns=columns)

    def _sorted(self):
        return sorted(self.operators.items(), key=lambda item: (-item[1].moved_bytes, item[0]))

    def __str__(self):
        """Work of 1 operator: 275 GFLOP, intensity 683 FLOP/byte
        reads 256 MiB, writes 128 MiB; if all were fused 384 MiB, 683 FLOP/byte
        """
        flops = f"{self.flops:,} FLOP" if self.flops < 1e6 else quantity(self.flops, "flops")
        lines = [
            f"Work of {self.calls:,} operator{'s' * (self.calls != 1)}: {flops}, "
            f"intensity {digits(self.intensity)} FLOP/byte",
            f"  reads {quantity(self.bytes_read, 'bytes')}, writes {quantity(self.bytes_written, 'bytes')}; if all "
            f"were fused {quantity(self.fused_bytes, 'bytes')}, {digits(self.fused_intensity)} FLOP/byte",
        ]
        return "\n".join([*lines, *(f"  not in the FLOPs: {what}" for what in self.unknown)])

    __repr__ = __str__


def counted(call: Callable, *inputs, **options) -> Work:
    """Run `call(*inputs, **options)` once and count its work; forward, backward and optimizer, whatever it does.

    Causal masks are not discounted, workspaces of libraries and what they repack are not seen, and code
    that torch.compile made runs eager for the time of the count. A step that changes parameters does change
    them. Raises PerflabError where no operator was seen, as inside a CUDA graph.

    >>> counted(torch.mm, torch.ones(8, 8), torch.ones(8, 8)).flops
    1024
    """
    given.check("counted", call, inputs, options)
    traffic = Traffic()
    products = flop_counter.FlopCounterMode(display=False, custom_mapping=_missing_formulas())
    with _eager(), traffic, products:
        result = call(*inputs, **options)
    if not traffic.seen:
        raise PerflabError("counted saw no operator: give it the eager model or function, not one captured in a graph.")
    returned = traffic.returned(result)
    del result  # and with it what was saved for a backward pass
    by_packet = products.get_flop_counts().get("Global", {})
    by_name = {str(packet): int(n) for packet, n in by_packet.items()}
    return traffic.work(returned, by_name, {str(packet) for packet in products.flop_registry})


def _missing_formulas() -> dict:
    """Formulas for attention on CPU, which torch lacks before 2.15 and then counts as nothing.

    They are torch's own, those of its other attention kernels: the two matrix products, and five backward.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    pairs = {name: _attention, f"{name}_backward": _attention_backward}
    packets = {getattr(torch.ops.aten, n): f for n, f in pairs.items() if hasattr(torch.ops.aten, n)}
    return {p: f for p, f in packets.items() if p not in flop_counter.flop_registry}


def _attention(query, key, value, *_, **__) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(grad, query, key, value, *_, **__) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, query, key, value)


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


class Traffic(TorchDispatchMode):
    """Sees each operator below autograd and autocast, with its real inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.seen: dict[str, Operator] = {}
        self._without: Counter[str] = Counter()  # calls of operators that the table does not hold
        # Storages made during the call, and their bytes. The weak reference also keeps the key from being used again.
        self._born: dict[int, tuple[StorageWeakRef, int]] = {}
        self._from_outside: dict[tuple, int] = {}  # bytes by view
        self._to_outside: dict[tuple, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._without[str(func)] += 1
        elif func.namespace != "profiler":
            self._see(func, args, kwargs, out)
        return out

    def _see(self, func, args, kwargs, out):
        name = str(func._overloadpacket)
        base = flops.base_name(name)
        inputs, outputs = tensors([args, kwargs]), tensors(out)
        changed, overwritten = _changed(func, args, kwargs)
        made = made_by(inputs, outputs)
        if not made and not changed and (outputs or base not in _READS_ONLY):
            return  # a view, or a question about a shape
        if base in _OVERWRITES:
            overwritten = changed
        reads = views_of(t for t in inputs if not any(t is o for o in overwritten))
        writes = views_of([*made, *changed])
        if base.endswith("_like") or base.startswith("new_"):
            reads = {}  # these look at a shape only
        if base in _ALLOCATES:
            reads, writes = {}, {}
        elif base in _PICKS:  # no more of the first input is read than is picked from it
            picked = max(t.numel() for t in [*outputs, *(t for t in inputs if not t.is_floating_point())])
            first = next(iter(reads))
            reads[first] = min(reads[first], picked * inputs[0].element_size())
        elif base in _PUTS:
            put = max((t.nbytes for t in inputs[1:]), default=0)
            writes = {view: min(n, put) for view, n in writes.items()}
        own_flops = 0
        if any(t.is_complex() for t in [*inputs, *outputs]):
            self._without[f"{name} of complex numbers"] += 1
        if flops.floating([*inputs, *outputs]):
            found = flops.flops_of(name, args, kwargs, outputs)
            own_flops = found or 0
            self._without[name] += found is None
        self._add(name, own_flops, reads, writes)
        self._born |= {_storage(t): (StorageWeakRef(t.untyped_storage()), distinct_bytes(t)) for t in made}
        for views, outside in ((reads, self._from_outside), (writes, self._to_outside)):
            outside |= {v: max(n, outside.get(v, 0)) for v, n in views.items() if v[0] not in self._born}

    def _add(self, name: str, flops: int, reads: dict, writes: dict):
        o = self.seen.get(name, Operator())
        read, written = o.bytes_read + sum(reads.values()), o.bytes_written + sum(writes.values())
        self.seen[name] = Operator(o.calls + 1, o.flops + flops, read, written)

    def returned(self, result) -> dict[int, int]:
        """Bytes of what the call made and returned, by storage."""
        return {view[0]: n for view, n in views_of(tensors(result)).items() if view[0] in self._born}

    def work(self, returned: dict[int, int], products: dict[str, int], registry: set[str]) -> Work:
        """The sum. `products` is torch's count by operator, `registry` names what torch has formulas for.

        Call it once the result is let go of: what was made and still lives is gradients and state.
        """
        kept = {k: n for k, (ref, n) in self._born.items() if not ref.expired()} | returned
        fused_bytes = sum(map(sum, (d.values() for d in (self._from_outside, self._to_outside, kept))))
        operators = {name: replace(o, flops=o.flops + products.get(name, 0)) for name, o in self.seen.items()}
        unknown = tuple(
            f"{name}, {n} call{'s' * (n != 1)}: no formula for it"
            for name, n in sorted(self._without.items())
            if n and name not in registry
        )
        columns = ("calls", "flops", "bytes_read", "bytes_written")
        totals = [sum(getattr(o, column) for o in operators.values()) for column in columns]
        return Work(*totals, unknown=unknown, fused_bytes=fused_bytes, operators=operators)


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
