"""The operators that notebook 05 places under the roofs: how each is called, and what it moves and calculates.

Bytes are those of its inputs and its output, each once; FLOPs follow `arithmetic`. Counting a real call with
`work.counted` gives the same, but for the two numbers a row that layer_norm keeps for its backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from perflab.bench import machine
from perflab.bench.timing import random_input

from . import peaks
from .flops import PER_ELEMENT
from .work import Work

ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SIZES = ("small", "medium", "large")
CHANGES = ("as it is", "twice the rows", "half the bytes")


@dataclass(frozen=True)
class RoofOperator:
    """An operator on a (rows, n) tensor x. `call(x, y, out)` writes into out where torch lets it.

    `reads` and `writes` count tensors of x's size, `flops` those of one element; a product reads an
    n x n matrix y instead and has 2 n FLOPs an element.
    """

    name: str
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    reads: int
    writes: int
    flops: int

    def work(self, rows: int, n: int, dtype: str, columns: int | None = None) -> Work:
        """Counted by formula: the FLOPs, and the bytes read and written, of one call.

        columns: those of the matrix y of a product, where it is not square.
        """
        item = ITEM_BYTES[dtype]
        x = rows * n * item
        if self.name == "matmul":
            columns = columns or n
            return Work(1, 2 * rows * n * columns, x + n * columns * item, rows * columns * item)
        return Work(1, self.flops * rows * n, self.reads * x, self.writes * x)

    def roof(self, dtype: str) -> str:
        """The arithmetic roof that holds for it: only products use tensor cores, the rest calculates in fp32."""
        return dtype if self.name == "matmul" else "fp32"


def _layer_norm(x, y, out):
    torch.nn.functional.layer_norm(x, x.shape[-1:])  # torch has no variant that writes into out


def _softmax(x, y, out):
    torch.ops.aten._softmax.out(x, -1, False, out=out)


def _by_name(*some: RoofOperator) -> dict[str, RoofOperator]:
    return {o.name: o for o in some}


OPERATORS: Mapping[str, RoofOperator] = _by_name(
    RoofOperator("add", lambda x, y, out: torch.add(x, y, out=out), 2, 1, PER_ELEMENT["add"]),
    RoofOperator("gelu", lambda x, y, out: torch.ops.aten.gelu.out(x, out=out), 1, 1, PER_ELEMENT["gelu"]),
    RoofOperator("layer_norm", _layer_norm, 1, 1, PER_ELEMENT["native_layer_norm"]),
    RoofOperator("softmax", _softmax, 1, 1, PER_ELEMENT["_softmax"]),
    RoofOperator("matmul", lambda x, y, out: torch.mm(x, y, out=out), 1, 1, 0),
)
PROBES: Mapping[str, RoofOperator] = _by_name(  # beside them, to compare with: the same bytes, and nothing written
    RoofOperator("copy", lambda x, y, out: out.copy_(x), 1, 1, 0),
    RoofOperator("sum", lambda x, y, out: torch.sum(x), 1, 0, PER_ELEMENT["sum"]),
)
ALL = OPERATORS | PROBES


@dataclass(frozen=True)
class OperatorCase:
    """One operator at one size with one change: what a cell of the study prepares."""

    operator: str
    size: str
    change: str = CHANGES[0]

    @property
    def label(self) -> str:
        tail = "" if self.change == CHANGES[0] else f", {self.change}"
        return f"{self.operator} {self.size}{tail}"

    @property
    def dtype(self) -> str:
        return "bf16" if self.change == "half the bytes" else "fp32"

    def shape(self, on: str) -> tuple[int, int]:
        """Rows and columns of x on "cuda" or "cpu"."""
        n = _sides(on, self.operator)[SIZES.index(self.size)]
        return n * (2 if self.change == "twice the rows" else 1), n

    def work(self, on: str) -> Work:
        return ALL[self.operator].work(*self.shape(on), self.dtype)


def _sides(on: str, operator: str) -> tuple[int, int, int]:
    """Columns of the three sizes: one that starting it outlasts, one between, one beyond the caches.

    On a processor the result of layer_norm, for which there is no memory beforehand, stays below 32 MiB with
    twice the rows too: so the C library keeps the block, and no fresh pages are timed.
    """
    if on == "cuda":
        return (16, 2048, 4096) if operator == "matmul" else (16, 512, 8192)
    return {"matmul": (16, 128, 256), "layer_norm": (16, 256, 2000)}.get(operator, (16, 256, 2304))


def grid(sizes: Sequence[str] = SIZES) -> dict[str, OperatorCase]:
    """Every operator at these sizes, as it is and with both changes, by label; and the probes at the largest."""
    cases = [OperatorCase(o, size, change) for o in OPERATORS for size in sizes for change in CHANGES]
    cases += [OperatorCase(o, SIZES[-1]) for o in PROBES]
    return {case.label: case for case in cases}


class Tensors:
    """Random inputs by shape and format, made once and shared by all operators, which only read them."""

    def __init__(self):
        self._made: dict[tuple, torch.Tensor] = {}

    def get(self, rows: int, n: int, dtype: str, which: int = 0) -> torch.Tensor:
        key = (rows, n, dtype, which)
        if key not in self._made:
            made = random_input(rows, n, dtype=peaks.DTYPES[dtype], device=machine.device(), seed=which)
            self._made[key] = made
        return self._made[key]

    def clear(self):
        self._made.clear()


def prepared(case: OperatorCase, tensors: Tensors) -> Callable[[], object]:
    """The call of a case, its tensors made: x, the other input, and memory for the result."""
    rows, n = case.shape(machine.device())
    x, out = tensors.get(rows, n, case.dtype), tensors.get(rows, n, case.dtype, 2)
    y = tensors.get(n if case.operator == "matmul" else rows, n, case.dtype, 1)
    call = ALL[case.operator].call
    return lambda: call(x, y, out)
