"""Exercises of notebook 05: the regimes of five calls before they are measured, and a bound by hand."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from perflab.bench import machine
from perflab.bench.result import Result
from perflab.bench.study import vary
from perflab.bench.timing import random_input
from perflab.bench.units import digits, quantity
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, numeric

from . import peaks
from .operators import OPERATORS
from .roofline import ARITHMETIC, BANDWIDTH, OVERHEAD, place
from .work import Work

REGIMES = (ARITHMETIC, BANDWIDTH, OVERHEAD)


@dataclass(frozen=True)
class RoofCall:
    """One call of the exercise: an fp32 operator on x of (rows, n); `columns` of a matrix that it multiplies."""

    operator: str
    rows: int
    n: int
    columns: int = 0

    def larger(self) -> "RoofCall":
        """Twice the rows, and of a product twice the columns too: a product that leaves most of a device idle
        may take the same time with twice the rows alone."""
        return RoofCall(self.operator, 2 * self.rows, self.n, 2 * self.columns)

    def work(self) -> Work:
        return OPERATORS[self.operator].work(self.rows, self.n, "fp32", self.columns)

    def ready(self) -> Callable[[], object]:
        on, second = machine.device(), (self.n, self.columns) if self.columns else (self.rows, self.n)
        x, y = random_input(self.rows, self.n, device=on), random_input(*second, device=on, seed=1)
        out = torch.zeros(self.rows, second[1], device=on)
        call = OPERATORS[self.operator].call
        return lambda: call(x, y, out)


CALLS: Mapping[str, RoofCall] = {
    "a": RoofCall("add", 16, 16),
    "b": RoofCall("add", 4096, 4096),
    "c": RoofCall("matmul", 1024, 1024, 1024),
    "d": RoofCall("matmul", 1, 4096, 4096),
    "e": RoofCall("softmax", 8, 64),
}


def _ready(case: str | RoofCall) -> Callable[[], object]:
    return peaks.prepared(case) if isinstance(case, str) else case.ready()


def _work(case: str | RoofCall) -> float:
    return peaks.work(case) if isinstance(case, str) else 1.0


def _measured() -> Result:
    """The copy, the fp32 product, and every call at its size and at twice the size: all in the same rounds."""
    cases: dict[str, str | RoofCall] = {peaks.COPY: peaks.COPY, "fp32": "fp32"} | dict(CALLS)
    cases |= {f"{name}, larger": call.larger() for name, call in CALLS.items()}
    return vary("call", cases, lambda call: call(), prepare=_ready, study="05.exercise", work=_work, budget_s=3)


def _truths(seen: Result) -> dict[str, tuple[str, str]]:
    """What this machine says of each call: its regime, "" where model and measurement disagree; and why."""
    here, time = peaks.of(seen), seen["time_s"]
    overhead_s, said = time.of("a").mid, {}
    for name, call in CALLS.items():
        work, longer = call.work(), time.ratio(f"{name}, larger", name).mid
        placed = place(work, here, "fp32", overhead_s)
        why = (
            f"{quantity(work.flops, 'flops')} need {quantity(placed.arithmetic_s, 's')} here, its "
            f"{quantity(work.moved_bytes, 'bytes')} {quantity(placed.bandwidth_s, 's')}, starting a call "
            f"{quantity(placed.overhead_s, 's')}, and at twice the size it took {digits(longer)} times as long"
        )
        agrees = (longer < math.sqrt(2)) == (placed.regime == OVERHEAD)
        said[name] = placed.regime if agrees else "", why
    return said


def _named(answer) -> Outcome:
    if not isinstance(answer, Mapping) or set(answer) != set(CALLS):
        form = 'dict(a="...", b="...", c=..., d=..., e=...)'
        return Outcome(INCORRECT, f"the answer names a regime for each letter: {form}.")
    answer = {name: str(word).strip().lower() for name, word in answer.items()}
    if strange := sorted(set(answer.values()) - set(REGIMES)):
        return Outcome(INCORRECT, f"the regimes are {', '.join(REGIMES)}, and not {', '.join(strange)}.")
    seen = _measured()
    if seen.reasons:
        return Outcome(CANNOT, f"this machine could not measure all of it: {'; '.join(seen.reasons.values())}.")
    truths = _truths(seen)
    if wrong := [name for name in CALLS if truths[name][0] not in ("", answer[name])]:
        name = wrong[0]
        also = f" Also not right: {', '.join(wrong[1:])}." if wrong[1:] else ""
        return Outcome(INCORRECT, f"{name} is not {answer[name]}: {truths[name][1]}.{also}")
    if unsure := [name for name in CALLS if not truths[name][0]]:
        why = f"{unsure[0]}: {truths[unsure[0]][1]}"
        return Outcome(CANNOT, f"nothing is wrong, but this machine does not follow the model for {why}. Check again.")
    return Outcome(CORRECT, "all five, and this machine agrees: twice the size changed each as its regime says.")


ROWS, INNER, PEAK, TB_PER_S = 64, 4096, 312.0, 2.0
FLOPS = 2 * ROWS * INNER * INNER
X, MATRIX = ROWS * INNER, INNER * INNER  # numbers; fp16 has two bytes for each
INTENSITY = FLOPS / (2 * (X + MATRIX + X))
MOST = INTENSITY * TB_PER_S
_HALF_OR_DOUBLE = "how many bytes does an fp16 number have?"
_MOST_CHECK = numeric(
    MOST,
    "62.1 FLOP per byte lie left of the ridge at 156: bandwidth is the limit.",
    [
        (PEAK, "that is the arithmetic roof. Does the product have enough FLOPs to a byte for it?"),
        (PEAK / TB_PER_S, "that is the ridge, in FLOP per byte. Where does the product lie beside it?"),
        (INTENSITY, "that is FLOP per byte, or one FLOP for a multiply-add, which counts two."),
        (
            FLOPS / (2 * (X + MATRIX)) * TB_PER_S,
            "you divided by the bytes that are read: the result is written, and counts too.",
        ),
        (2 * MOST, _HALF_OR_DOUBLE),
        (MOST / 2, _HALF_OR_DOUBLE),
        (FLOPS / (2 * MATRIX) * TB_PER_S, "close: the rows and the result are bytes too, not the weights alone."),
    ],
    "FLOPs over bytes moved, times bytes a second; and never above the arithmetic roof.",
    example="one number, in TFLOP/s, such as 200",
    tolerance=0.006,
)


PROBLEMS = {
    "05.1": Problem(
        "All in fp32, results written into memory that is there: (a) the sum of two 16 x 16 tensors; (b) of two "
        "4096 x 4096 tensors; (c) the product of two 1024 x 1024 matrices; (d) the product of one row of 4096 numbers "
        "with a 4096 x 4096 matrix; (e) a softmax of 8 rows of 64. Name the regime of each on this machine before you "
        'measure: dict(a="overhead", ...), each "arithmetic", "bandwidth" or "overhead".',
        _named,
        (
            "For each: FLOPs and bytes, read and written. A product of (m, k) and (k, n) has 2 m k n FLOPs.",
            "Divide FLOPs by the fp32 roof and bytes by the copy's roof above. Which is longer, and is it longer than "
            "starting a call, some microseconds?",
            "In (d) every number of the matrix is read and used once. In (c) each is used 1024 times.",
        ),
        'dict(a="overhead", b="bandwidth", c="arithmetic", d="bandwidth", e="overhead")',
    ),
    "05.2": Problem(
        "A card does 312 TFLOP/s in fp16 and moves 2 TB/s (1 TB = 10^12 bytes). A layer multiplies 64 rows of 4096 "
        "numbers with a 4096 x 4096 matrix, all in fp16, each tensor moved once. How many TFLOP/s are the most?",
        _MOST_CHECK,
        (
            "2 m k n FLOPs; bytes of the rows, of the matrix and of the result.",
            "FLOP per byte times bytes a second is FLOP/s. The smaller of that and the arithmetic roof holds.",
        ),
        "min(312, 2 * 64 * 4096 * 4096 / (2 * (2 * 64 * 4096 + 4096 * 4096)) * 2)",
    ),
}
