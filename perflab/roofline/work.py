"""What an operator or a model does, counted and not timed: FLOPs, bytes moved, and what could not be counted.

Floating-point operations of matrix products, convolutions and attention are torch's own count
(FlopCounterMode); those of other operators follow the table of `flops`. Bytes are the sizes of what each
operator reads and writes. Nothing may be timed in here: counting slows code many times over.
"""

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perflab.bench.units import digits, quantity
from perflab.errors import PerflabError

from . import flops

# Operators that do not simply read each input and write each result, by what they do instead.
_KIND_NAMES = {
    "allocates": "empty empty_like empty_strided new_empty new_empty_strided resize set",  # moves nothing
    "takes a shape": "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full",
    "overwrites": "copy fill zero normal uniform bernoulli random exponential",  # what it changes it does not read
    "answers": "_local_scalar_dense equal item is_nonzero",  # with a number, and no tensor
    "picks": "embedding index_select gather index _unsafe_index nll_loss_forward nll_loss2d_forward",  # a few elements
    "puts": "index_put scatter scatter_add index_add index_copy",  # a few elements into a large tensor
}
_KINDS = {name: kind for kind, names in _KIND_NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Work:
    """The work of one call or of one operator: FLOPs, bytes read and written, FLOPs per byte moved (`intensity`).

    The bytes are summed over operators, as if each fetched its inputs from memory and put its outputs
    back: the traffic without fusion and without caches. `unknown` names operators whose FLOPs are not in
    `flops`, with the reason. `operators` is the same by operator; `calls` is how many ran.
    """

    calls: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    unknown: tuple[str, ...] = ()
    operators: Mapping[str, "Work"] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; nan where nothing moves."""
        return self.flops / self.moved_bytes if self.moved_bytes else math.nan

    def table(self):
        """A pandas DataFrame, a row an operator: calls, flops, bytes_read, bytes_written, intensity."""
        import pandas as pd

        columns = ["calls", "flops", "bytes_read", "bytes_written", "intensity"]
        ordered = sorted(self.operators.items(), key=lambda item: (-item[1].moved_bytes, item[0]))
        return pd.DataFrame([{"operator": name, **{c: getattr(o, c) for c in columns}} for name, o in ordered])

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
    counting = Counting()
    products = flop_counter.FlopCounterMode(display=False, custom_mapping=_missing_formulas())
    # Compiled code that was counted inside its graph would stay slow afterwards.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    with eager, counting, products:
        call(*inputs, **options)
    if not counting.sums:
        raise PerflabError("counted saw no operator: give it the eager model or function, not one captured in a graph.")
    for packet, n in products.get_flop_counts().get("Global", {}).items():
        if str(packet) in counting.sums:
            counting.sums[str(packet)].update(flops=int(n))
    for packet in products.flop_registry:
        counting.without.pop(str(packet), None)
    unknown = (f"{name}, {n} call{'s' * (n != 1)}: no formula for it" for name, n in sorted(counting.without.items()))
    operators = {name: Work(**sums) for name, sums in counting.sums.items()}
    return Work(**sum(counting.sums.values(), Counter()), unknown=tuple(unknown), operators=operators)


def _missing_formulas() -> dict:
    """Formulas for attention on CPU, which torch lacks before 2.15 and then counts as nothing.

    They are torch's own, those of its other attention kernels: the two matrix products, and five backward.
    """
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        forward: lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v),
        backward: lambda grad, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(grad, q, k, v),
    }
    return {packet: formula for packet, formula in formulas.items() if packet not in flop_counter.flop_registry}


class Counting(TorchDispatchMode):
    """Sees each operator below autograd and autocast, with its real inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.sums: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by operator, with the fields of Work
        self.without: Counter[str] = Counter()  # calls of operators that the table of FLOPs does not hold

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self.without[str(func)] += 1
        elif func.namespace != "profiler":
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func, args, kwargs, out):
        name = str(func._overloadpacket)
        kind = _KINDS.get(flops.base_name(name))
        inputs, outputs = tensors([args, kwargs]), tensors(out)
        created, changed, overwritten = made_by(inputs, outputs), *_changed(func, args, kwargs)
        if not created and not changed and kind != "answers":
            return  # a view, or a question about a shape
        some = [*inputs, *outputs]
        operations = flops.flops_of(name, args, kwargs, outputs) if any(t.is_floating_point() for t in some) else 0
        if operations is None:
            self.without[name] += 1
        if any(t.is_complex() for t in some):
            self.without[f"{name} of complex numbers"] += 1
        read, written = traffic(kind, inputs, created, changed, overwritten)
        self.sums[name].update(calls=1, flops=operations or 0, bytes_read=read, bytes_written=written)


def traffic(kind: str | None, inputs: Sequence, created: Sequence, changed: Sequence, overwritten: Sequence):
    """Bytes that an operator of one kind reads and writes.

    created: its outputs in memory of their own. changed: the inputs that it writes into. overwritten: those of them
    that it does not read.
    """
    if kind == "allocates":
        return 0, 0
    unread = {"takes a shape": inputs, "overwrites": changed}.get(kind, overwritten)
    reads = views_of(t for t in inputs if not any(t is other for other in unread))
    writes = views_of([*created, *changed])
    if kind == "picks":
        indices = [t for t in inputs if not t.is_floating_point()]
        picked = max(t.numel() for t in [*created, *changed, *indices])
        table = next(iter(reads))
        reads[table] = min(reads[table], picked * inputs[0].element_size())
    elif kind == "puts":
        put = max((t.nbytes for t in inputs[1:]), default=0)
        writes = {view: min(n, put) for view, n in writes.items()}
    return sum(reads.values()), sum(writes.values())


def _changed(func, args, kwargs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator writes into, by its schema; and those of them that are its `out`."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [argument for argument in func._schema.arguments if argument.is_write]
    out = [argument.name for argument in written if argument.is_out]
    return tensors([given.get(argument.name) for argument in written]), tensors([given.get(name) for name in out])


def tensors(x) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and mappings."""
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def made_by(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs that have memory of their own: of a view, none."""
    theirs = {_storage(t) for t in inputs}
    return [t for t in outputs if _storage(t) not in theirs]


def views_of(some: Iterable[torch.Tensor]) -> dict[tuple, int]:
    """The distinct pieces of memory that tensors address, with their bytes: `x + x` and `x @ x.t()` read x once."""
    pieces = ((_storage(t), t.storage_offset(), _span(t), distinct_bytes(t)) for t in some)
    return {piece: piece[-1] for piece in pieces}


def distinct_bytes(t: torch.Tensor) -> int:
    """Bytes of memory that a tensor addresses: an expanded dimension counts once, overlapping windows once."""
    addressed = math.prod(size for size, step in zip(t.shape, t.stride(), strict=True) if step)
    return min(addressed, _span(t)) * t.element_size() if t.numel() else 0


def _span(t: torch.Tensor) -> int:
    """From the first number of a tensor to its last one: the same for its transposes and reshaped views."""
    return 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))


def _storage(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise PerflabError(f"The bytes of a {kind} tensor are not known here: take the part with dense tensors alone.")
    return t.untyped_storage()._cdata
