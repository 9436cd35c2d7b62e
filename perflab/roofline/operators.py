"""The operators that notebook 05 places under the roofs: how each is called, and what it moves and calculates.

Bytes are those of its inputs and its output, each once; FLOPs follow `flops`. Counting a real call with
`work.counted` gives the same, but for the two numbers a row that layer_norm keeps for its backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from perflab.bench import machine
from perflab.bench.timing import random_input

from . import peaks
from .flops import PER_ELEMENT
from .work import Work

ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SIZES = ("small", "medium", "large")
CHANGES = AS_IT_IS, TWICE, HALF = ("as it is", "twice the rows", "half the bytes")


class RoofOperator(NamedTuple):
    """An operator: `call(x, y, out)` writes into out where torch lets it.

    `reads` and `writes` count tensors of x's size, `flops` those of one element; a product reads a matrix y instead.
    """

    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    reads: int
    writes: int
    flops: int


def _layer_norm(x, y, out):
    torch.nn.functional.layer_norm(x, x.shape[-1:])  # torch has no variant that writes into out


def _softmax(x, y, out):
    torch.ops.aten._softmax.out(x, -1, False, out=out)


OPERATORS: Mapping[str, RoofOperator] = {
    "add": RoofOperator(lambda x, y, out: torch.add(x, y, out=out), 2, 1, PER_ELEMENT["add"]),
    "gelu": RoofOperator(lambda x, y, out: torch.ops.aten.gelu.out(x, out=out), 1, 1, PER_ELEMENT["gelu"]),
    "layer_norm": RoofOperator(_layer_norm, 1, 1, PER_ELEMENT["native_layer_norm"]),
    "softmax": RoofOperator(_softmax, 1, 1, PER_ELEMENT["_softmax"]),
    "matmul": RoofOperator(lambda x, y, out: torch.mm(x, y, out=out), 1, 1, 0),
}
PROBES: Mapping[str, RoofOperator] = {  # beside them, to compare with: the same bytes, and nothing written
    "copy": RoofOperator(lambda x, y, out: out.copy_(x), 1, 1, 0),
    "sum": RoofOperator(lambda x, y, out: torch.sum(x), 1, 0, PER_ELEMENT["sum"]),
}
ALL = OPERATORS | PROBES


@dataclass(frozen=True)
class OperatorCall:
    """An operator on x of (rows, n) in one format; a product multiplies x with a matrix of (n, columns)."""

    operator: str
    rows: int
    n: int
    dtype: str = "fp32"
    columns: int = 0  # of a product

    @property
    def work(self) -> Work:
        """By formula: the FLOPs, and the bytes read and written, of one call."""
        kind, item, x = ALL[self.operator], ITEM_BYTES[self.dtype], self.rows * self.n
        if self.columns:
            out, matrix = self.rows * self.columns, self.n * self.columns
            return Work(1, 2 * self.rows * matrix, (x + matrix) * item, out * item)
        return Work(1, kind.flops * x, kind.reads * x * item, kind.writes * x * item)

    @property
    def roof(self) -> str:
        """The arithmetic roof that holds for it: only products use tensor cores, the rest calculates in fp32."""
        return self.dtype if self.columns else "fp32"

    def ready(self, tensors: dict[tuple, torch.Tensor]) -> Callable[[], object]:
        """The call with its inputs and memory for its result: random numbers from `tensors`, where they are kept.

        Calls that share `tensors` share their inputs, by shape and format.
        """

        def tensor(rows: int, n: int, seed: int) -> torch.Tensor:
            key = (rows, n, self.dtype, seed)
            if key not in tensors:
                dtype = peaks.DTYPES[self.dtype]
                tensors[key] = random_input(rows, n, dtype=dtype, device=machine.device(), seed=seed)
            return tensors[key]

        x, out = tensor(self.rows, self.n, 0), tensor(self.rows, self.columns or self.n, 2)
        y = tensor(self.n, self.columns, 1) if self.columns else tensor(self.rows, self.n, 1)
        call = ALL[self.operator].call
        return lambda: call(x, y, out)


def label(operator: str, size: str, change: str = AS_IT_IS) -> str:
    """ "add large, twice the rows": the name of a call in the study."""
    return f"{operator} {size}" if change == AS_IT_IS else f"{operator} {size}, {change}"


def grid(sizes: Sequence[str] = SIZES, on: str | None = None) -> dict[str, OperatorCall]:
    """Every operator at these sizes, as it is and with both changes, by label; and the probes at the largest.

    on: "cuda" or "cpu", by default the device of this machine.
    """
    cases = [(operator, size, change) for operator in OPERATORS for size in sizes for change in CHANGES]
    cases += [(probe, SIZES[-1], AS_IT_IS) for probe in PROBES]
    return {label(*case): _sized(*case, on or machine.device()) for case in cases}


def _sized(operator: str, size: str, change: str, on: str) -> OperatorCall:
    """The three sizes: one that starting it outlasts, one between, one beyond the caches.

    On a processor the result of layer_norm, for which there is no memory beforehand, stays below 32 MiB with
    twice the rows too: so the C library keeps the block, and no fresh pages are timed.
    """
    if on == "cuda":
        sides = (16, 2048, 4096) if operator == "matmul" else (16, 512, 8192)
    else:
        sides = {"matmul": (16, 128, 256), "layer_norm": (16, 256, 2000)}.get(operator, (16, 256, 2304))
    n = sides[SIZES.index(size)]
    rows, dtype = (2 * n if change == TWICE else n), ("bf16" if change == HALF else "fp32")
    return OperatorCall(operator, rows, n, dtype, n if operator == "matmul" else 0)
