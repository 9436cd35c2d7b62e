"""What automatic mixed precision does: which operator runs in which dtype, what is cast, what stays float32.

That is counted, not timed, by a mode that sits below autocast and sees what really runs. Last, TF32: float32
matrix products on tensor cores, off by default, and how much of a step they are.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from perflab.bench import machine, timing
from perflab.bench.units import quantity
from perflab.errors import PerflabError

from . import work

LOW = (torch.bfloat16, torch.float16)
CPU_NOTE = (
    "On CPU autocast has operator lists of its own: layer_norm and softmax stay in the low dtype there. "
    "This says nothing of CUDA."
)


class Ran(NamedTuple):
    """An operator and the floating dtypes that it read and wrote: "bfloat16 + float32" where there are several."""

    operator: str
    reads: str
    writes: str

    @property
    def is_cast(self) -> bool:
        """Does it change one floating dtype into another?"""
        return self.operator == "_to_copy" and bool(self.reads and self.writes) and self.reads != self.writes


@dataclass(frozen=True)
class Audit:
    """One forward under autocast, beside the same in float32.

    `ran` has the number of calls of each operator and its dtypes. `casts` are changes of a floating dtype, of
    `operators` in all; `casts_uncached` as many with `cache_enabled=False`. `parameter_bytes` before, and inside the
    region; `copy_bytes` is what copies of parameters in the low dtype take while it lasts. `saved_bytes` is
    what a backward pass would find: in float32, under autocast; parameters are not counted in it.
    """

    device: str
    dtype: str
    ran: Mapping[Ran, int]
    plain_operators: int
    operators: int
    casts: int
    casts_uncached: int
    parameter_bytes: tuple[int, int]
    copy_bytes: int
    saved_bytes: tuple[int, int]
    note: str = ""

    @property
    def casts_share(self) -> float:
        """Casts over all operators that ran, casts included."""
        return self.casts / self.operators

    def rows(self) -> dict[str, dict]:
        """Columns for `observe`: reads, writes and calls, by operator; the casts are its last rows."""
        variants = Counter(key.operator for key in self.ran)
        rows = {}
        for key in sorted(self.ran, key=lambda key: key.operator == "_to_copy"):
            name = f"{key.operator}, {key.reads}" if variants[key.operator] > 1 else key.operator
            rows[name] = {"reads": key.reads, "writes": key.writes, "calls": self.ran[key]}
        return rows

    def __repr__(self):
        before, inside = (quantity(n, "bytes") for n in self.parameter_bytes)
        plain, low = (quantity(n, "bytes") for n in self.saved_bytes)
        lines = [
            f"autocast to {self.dtype} on {self.device}: {self.operators} operators, in float32 {self.plain_operators}",
            f"casts: {self.casts} ({self.casts_share:.0%} of the operators), without the cache {self.casts_uncached}",
            f"parameters: {before} before, {inside} inside, and copies of {quantity(self.copy_bytes, 'bytes')}",
            f"saved for backward: {plain} in float32, {low} under autocast",
            *(f"{key.operator}: reads {key.reads}, writes {key.writes}, {n}x" for key, n in self.ran.items()),
            self.note,
        ]
        return "\n  ".join(filter(None, lines))


def audit(call: Callable, *inputs, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Audit:
    """Run `call(*inputs)` in float32 and under autocast, with its cache and without, and note what ran.

    `call` is a model or a function, its inputs in float32. `device` is that of the inputs or parameters
    unless given. Random numbers are drawn three times. Raises PerflabError for what cannot be audited.

    >>> audit(torch.nn.Linear(8, 8), torch.ones(2, 8))  # doctest: +ELLIPSIS
    autocast to bfloat16 on cpu: 4 operators, in float32 1...
    """
    if dtype not in LOW:
        raise PerflabError(f"autocast casts to bfloat16 or float16, not to {_plain(dtype)}: dtype=torch.bfloat16.")
    parameters = list(call.parameters()) if isinstance(call, torch.nn.Module) else []
    if any(p.dtype in LOW for p in parameters):
        raise PerflabError("The model's parameters are 16-bit already: give autocast a float32 model, without .to().")
    device = str(device or next((t.device.type for t in [*work.tensors(inputs), *parameters]), "cpu")).split(":")[0]
    if why := {"cpu": None, "cuda": machine.missing("cuda")}.get(device, "it knows cpu and cuda"):
        raise PerflabError(f"audit cannot look at autocast on {device}: {why}.")
    if torch.is_autocast_enabled(device):
        raise PerflabError("audit turns autocast on by itself: call it outside of torch.autocast.")
    plain = _watched(call, inputs, parameters, contextlib.nullcontext())
    cached = _watched(call, inputs, parameters, torch.autocast(device, dtype))
    uncached = _watched(call, inputs, parameters, torch.autocast(device, dtype, cache_enabled=False))
    if not cached.calls:
        raise PerflabError("audit saw no operator: give it the eager model or function, not one captured in a graph.")
    return Audit(
        device,
        _plain(dtype),
        cached.calls,
        plain.calls.total(),
        cached.calls.total(),
        cached.casts,
        uncached.casts,
        (plain.parameter_bytes, cached.parameter_bytes),
        sum(cached.copies.values()),
        (sum(plain.saved.values()), sum(cached.saved.values())),
        CPU_NOTE if device == "cpu" else "",
    )


class Dtypes(TorchDispatchMode):
    """Notes the dtypes that each operator really reads and writes; views, and what only allocates, are left out."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[Ran] = Counter()
        self.copies: dict[tuple, int] = {}  # bytes of the copies that autocast keeps, by what they are copies of
        self.saved: dict[tuple, int] = {}  # bytes that autograd saves, each piece of memory once
        self.parameter_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = work.tensors([args, kwargs]), work.tensors(out)
        key = Ran(func._overloadpacket.__name__, _floats(inputs), _floats(outputs))
        if (work.made_by(inputs, outputs) or func._schema.is_mutable) and "empty" not in key.operator:
            self.calls[key] += 1
            if key.is_cast and inputs[0].is_leaf and inputs[0].requires_grad:  # autocast's own rule for its cache
                self.copies |= dict.fromkeys(work.views_of(inputs), outputs[0].nbytes)
        return out

    @property
    def casts(self) -> int:
        return sum(n for key, n in self.calls.items() if key.is_cast)


def _watched(call, inputs, parameters, region) -> Dtypes:
    """What `call` does inside `region`."""
    dtypes, held = Dtypes(), []  # held, so that no memory is used twice
    known = {piece[0] for piece in work.views_of(parameters)}  # they are there anyway

    def pack(t):
        held.append(t)
        dtypes.saved |= {piece: n for piece, n in work.views_of([t]).items() if piece[0] not in known}
        return t

    with region, dtypes, saved_tensors_hooks(pack, lambda t: t):
        call(*inputs)
        dtypes.parameter_bytes = sum(p.nbytes for p in parameters)
    return dtypes


def _floats(some) -> str:
    """ "bfloat16 + float32": the floating dtypes of tensors, each once."""
    return " + ".join(sorted({_plain(t.dtype) for t in some if t.is_floating_point()}))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def after_a_step(model: torch.nn.Module, *inputs, dtype: torch.dtype | None = None) -> dict[str, float | str]:
    """Columns for `observe`: dtype and bytes of parameters, gradients and AdamW's state after one step.

    Trains a copy of the model; under autocast to `dtype`, or without where that is None.
    """
    mine = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(mine.parameters())
    device = next(mine.parameters()).device.type
    with torch.autocast(device, dtype, enabled=dtype is not None):
        loss = mine(*inputs).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    parameters = list(mine.parameters())
    parts = {
        "parameter": parameters,
        "gradient": [p.grad for p in parameters if p.grad is not None],
        "state": [t for t in work.tensors(list(optimizer.state.values())) if t.dim()],  # not the step counts
    }
    columns: dict[str, float | str] = {}
    for name, some in parts.items():
        columns |= {f"{name}s": _floats(some), f"{name}_bytes": sum(t.nbytes for t in some)}
    return columns


# -- TF32

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision(name) for the time of a `with`: "high" lets float32 products use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Named(TorchDispatchMode):
    """Puts each matrix product on float32 under a name that the profiler shows."""

    name = "perflab float32 product"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = next((t for t in work.tensors(args)), None)
        product = func._overloadpacket.__name__ in PRODUCTS and first is not None and first.dtype == torch.float32
        with torch.profiler.record_function(self.name) if product else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def float32_products(step: Callable[[], object]) -> tuple[float, float]:
    """(products_share, busy_share) of a step on a CUDA device.

    Both are read from one trace of torch.profiler, which slows the host and not the kernels: from two, clocks that
    changed between them could make a share above one. The second is over the time of the step unprofiled. nan
    where the profiler sees no device. Raises PerflabError without a CUDA device.
    """
    if why := machine.missing("cuda"):
        raise PerflabError(f"float32_products reads a CUDA device's time: {why}.")
    step()
    wall_s = min(timing.wall(step, blocks=5)[0])
    with timing.profiler() as seen, Named():
        step()
        torch.cuda.synchronize()
    return shares(seen.events(), wall_s)


def shares(events, wall_s: float) -> tuple[float, float]:
    """(products_share, busy_share) from the profiler's events of a step that takes `wall_s` unprofiled."""
    busy_s, host = timing.worked(events), torch.autograd.DeviceType.CPU
    products_us = sum(e.device_time_total for e in events if e.name == Named.name and e.device_type == host)
    return min(products_us / 1e6 / busy_s, 1.0), busy_s / wall_s  # two kernels may overlap by their ends
