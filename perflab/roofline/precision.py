"""What automatic mixed precision does: which operator runs in which dtype, what is cast, what stays float32.

Everything here is counted, not timed, by a mode that sits below autocast and sees what really runs.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from perflab.bench import machine
from perflab.bench.units import quantity
from perflab.errors import PerflabError
from perflab.launch import given

from . import work

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Ran:
    """All calls of one operator that read and wrote the same dtypes."""

    operator: str
    reads: str
    writes: str
    calls: int


class Dtypes(TorchDispatchMode):
    """Notes the dtypes that each operator really reads and writes; views, and what only allocates, are left out."""

    def __init__(self):
        super().__init__()
        self.calls: dict[tuple[str, str, str], int] = {}
        self.casts = 0
        self.copies: dict[tuple, int] = {}  # 16-bit copies of parameters, by what they are copies of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = work.tensors([args, kwargs]), work.tensors(out)
        name = func._overloadpacket.__name__
        if (work.made_by(inputs, outputs) or func._schema.is_mutable) and "empty" not in name:
            key = (name, _floats(inputs), _floats(outputs))
            self.calls[key] = self.calls.get(key, 0) + 1
            self._cast(key, inputs, outputs)
        return out

    def _cast(self, key, inputs, outputs):
        name, read, written = key
        if name == "_to_copy" and read and written and read != written:
            self.casts += 1
            if isinstance(inputs[0], torch.nn.Parameter) or (inputs[0].is_leaf and inputs[0].requires_grad):
                self.copies |= dict.fromkeys(work.views_of(inputs), outputs[0].nbytes)

    @property
    def operators(self) -> int:
        return sum(self.calls.values())


def _floats(some) -> str:
    """ "bfloat16 + float32": the floating dtypes of tensors, each once."""
    return " + ".join(sorted({_plain(t.dtype) for t in some if t.is_floating_point()}))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Audit:
    """One forward under autocast, beside the same in float32.

    `ran` has a row for each operator and its dtypes. `casts` are changes of a floating dtype, of `operators`
    in all; `casts_uncached` as many with `cache_enabled=False`. `parameter_bytes` before, and inside the
    region; `copy_bytes` is what copies of parameters in the low dtype take while it lasts. `saved_bytes` is
    what a backward pass would find: in float32, under autocast; parameters are not counted in it.
    """

    device: str
    dtype: str
    ran: tuple[Ran, ...]
    plain_operators: int
    operators: int
    casts: int
    casts_uncached: int
    parameter_bytes: tuple[int, int]
    copy_bytes: int
    saved_bytes: tuple[int, int]
    note: str = ""
    parameter_dtypes: tuple[str, str] = field(default=("", ""))

    @property
    def casts_share(self) -> float:
        """Casts over all operators that ran, casts included."""
        return self.casts / self.operators

    def dtypes_of(self, operator: str) -> str:
        """The dtypes that an operator read, such as "float32"; "" if it did not run. Casts have their own."""
        return " + ".join(sorted({d for r in self.ran if r.operator == operator for d in r.reads.split(" + ")}))

    def rows(self) -> dict[str, dict]:
        """Columns for `observe`: reads, writes and calls, by operator; the casts are its last rows."""
        ordered = sorted(self.ran, key=lambda r: r.operator == "_to_copy")
        several = {r.operator for r in ordered if sum(o.operator == r.operator for o in ordered) > 1}
        names = [f"{r.operator}, {r.reads}" if r.operator in several else r.operator for r in ordered]
        return {
            n: {"reads": r.reads, "writes": r.writes, "calls": r.calls} for n, r in zip(names, ordered, strict=True)
        }

    def table(self):
        """The rows as a pandas DataFrame: operator, reads, writes, calls."""
        import pandas as pd

        return pd.DataFrame([vars(r) for r in self.ran], columns=["operator", "reads", "writes", "calls"])

    def __str__(self):
        before, inside = (quantity(n, "bytes") for n in self.parameter_bytes)
        plain, low = (quantity(n, "bytes") for n in self.saved_bytes)
        lines = [
            f"autocast to {self.dtype} on {self.device}: {self.operators} operators, in float32 {self.plain_operators}",
            f"  casts: {self.casts} ({self.casts_share:.0%} of the operators), without the cache {self.casts_uncached}",
            f"  parameters: {before} before, {inside} inside, and copies of {quantity(self.copy_bytes, 'bytes')}",
            f"  saved for backward: {plain} in float32, {low} under autocast",
            *(f"  {r.operator}: reads {r.reads}, writes {r.writes}, {r.calls}x" for r in self.ran),
        ]
        return "\n".join(lines + [f"  {self.note}"] * bool(self.note))

    __repr__ = __str__


CPU_NOTE = (
    "On CPU autocast has operator lists of its own: layer_norm and softmax stay in the low dtype there. "
    "This says nothing of CUDA."
)


def audit(call: Callable, *inputs, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Audit:
    """Run `call(*inputs)` in float32 and under autocast, with its cache and without, and note what ran.

    `call` is a model or a function, its inputs in float32. `device` is that of the inputs or parameters
    unless given. Random numbers are drawn three times. Raises PerflabError for what cannot be audited.

    >>> audit(torch.nn.Linear(8, 8), torch.ones(2, 8))  # doctest: +ELLIPSIS
    autocast to bfloat16 on cpu: 4 operators, in float32 1...
    """
    given.check("audit", call, inputs)
    _castable(dtype)
    parameters = _parameters(call)
    if any(p.dtype in LOW for p in parameters):
        raise PerflabError("The model's parameters are 16-bit already: give autocast a float32 model, without .to().")
    device = str(device or next((t.device.type for t in [*work.tensors(inputs), *parameters]), "cpu")).split(":")[0]
    if why := None if device == "cpu" else machine.missing("cuda") if device == "cuda" else "it knows cpu and cuda":
        raise PerflabError(f"audit cannot look at autocast on {device}: {why}.")
    if torch.is_autocast_enabled(device):
        raise PerflabError("audit turns autocast on by itself: call it outside of torch.autocast.")
    plain, plain_saved, _ = _seen(call, inputs, parameters, contextlib.nullcontext())
    cached, saved, inside = _seen(call, inputs, parameters, torch.autocast(device, dtype))
    uncached, *_ = _seen(call, inputs, parameters, torch.autocast(device, dtype, cache_enabled=False))
    if not cached.operators:
        raise PerflabError("audit saw no operator: give it the eager model or function, not one captured in a graph.")
    return Audit(
        device,
        _plain(dtype),
        tuple(Ran(*key, calls) for key, calls in cached.calls.items()),
        plain.operators,
        cached.operators,
        cached.casts,
        uncached.casts,
        (sum(p.nbytes for p in parameters), inside[0]),
        sum(cached.copies.values()),
        (plain_saved, saved),
        CPU_NOTE if device == "cpu" else "",
        (_floats(parameters), inside[1]),
    )


def _castable(dtype):
    if dtype not in LOW:
        raise PerflabError(f"autocast casts to bfloat16 or float16, not to {_plain(dtype)}: dtype=torch.bfloat16.")


def _parameters(call) -> list[torch.Tensor]:
    return list(call.parameters()) if isinstance(call, torch.nn.Module) else []


def _seen(call, inputs, parameters, region) -> tuple[Dtypes, int, tuple[int, str]]:
    with region, Dtypes() as seen, _saved(parameters) as saved:
        result = call(*inputs)
        inside = sum(p.nbytes for p in parameters), _floats(parameters)
    del result
    return seen, saved.nbytes, inside


class _Saved:
    def __init__(self):
        self.views: dict[tuple, int] = {}
        self.held: list[torch.Tensor] = []  # so that no memory is used twice

    @property
    def nbytes(self) -> int:
        return sum(self.views.values())


@contextlib.contextmanager
def _saved(parameters) -> Iterator[_Saved]:
    """What autograd saves in here, each piece of memory once; parameters are there anyway."""
    saved, theirs = _Saved(), {view[0] for view in work.views_of(parameters)}

    def pack(t):
        saved.views |= {view: n for view, n in work.views_of([t]).items() if view[0] not in theirs}
        saved.held.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield saved
    saved.held.clear()


def after_a_step(model: torch.nn.Module, *inputs, dtype: torch.dtype | None = None) -> dict[str, float | str]:
    """Columns for `observe`: dtype and bytes of parameters, gradients and AdamW's state after one step.

    Runs a copy of the model; under autocast to `dtype`, or without where that is None. Raises PerflabError for
    a model that no step could train.
    """
    given.check("after_a_step", model, inputs)
    if not any(p.requires_grad for p in _parameters(model)):
        raise PerflabError("after_a_step needs a model with parameters to train: this has none.")
    if dtype is not None:
        _castable(dtype)
    mine = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(mine.parameters())
    device = next(mine.parameters()).device.type
    region = contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)
    with region:
        loss = sum(t.float().pow(2).mean() for t in work.tensors(mine(*inputs)))
    loss.backward()
    optimizer.step()
    parts = {
        "parameter": list(mine.parameters()),
        "gradient": [p.grad for p in mine.parameters() if p.grad is not None],
        "state": [t for s in optimizer.state.values() for t in work.tensors(s) if t.dim()],  # not the step counts
    }
    columns: dict[str, float | str] = {}
    for name, some in parts.items():
        columns |= {f"{name}s": _floats(some), f"{name}_bytes": sum(t.nbytes for t in some)}
    return columns
