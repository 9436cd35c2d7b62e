"""Exercises of notebook 05: the regimes of five calls before they are measured, and a bound by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from perflab.bench.result import Result
from perflab.bench.study import vary
from perflab.bench.units import digits, quantity
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, numeric

from . import peaks
from .operators import OperatorCall
from .roofline import ARITHMETIC, BANDWIDTH, OVERHEAD, place

REGIMES = (ARITHMETIC, BANDWIDTH, OVERHEAD)
CALLS = {
    "a": OperatorCall("add", 16, 16),
    "b": OperatorCall("add", 4096, 4096),
    "c": OperatorCall("matmul", 1024, 1024, columns=1024),
    "d": OperatorCall("matmul", 1, 4096, columns=4096),
    "e": OperatorCall("softmax", 8, 64),
}


def larger(call: OperatorCall) -> OperatorCall:
    """Twice the rows, and of a product twice the columns too: a product that leaves most of a device idle
    may take the same time with twice the rows alone."""
    return replace(call, rows=2 * call.rows, columns=2 * call.columns)


def _measured() -> Result:
    """The copy, the fp32 product, and every call at its size and at twice the size: all in the same rounds."""
    cases = {kind: (partial(peaks.prepared, kind), peaks.work(kind)) for kind in (peaks.COPY, "fp32")}
    cases |= {letter: (partial(call.ready, {}), 1.0) for letter, call in CALLS.items()}
    cases |= {f"{letter}, larger": (partial(larger(call).ready, {}), 1.0) for letter, call in CALLS.items()}
    return vary(
        "call",
        cases,
        lambda call: call(),
        prepare=lambda case: case[0](),
        work=lambda case: case[1],
        study="05.exercise",
        budget_s=3,
    )


def _truth(letter: str, seen: Result) -> tuple[str, str]:
    """What this machine says of a call: its regime, "" where model and measurement disagree; and why."""
    work, time = CALLS[letter].work, seen["time_s"]
    placed = place(work, peaks.of(seen), "fp32", time.of("a").mid)
    longer = time.ratio(f"{letter}, larger", letter).mid
    why = (
        f"{quantity(work.flops, 'flops')} need {quantity(placed.needs_s[ARITHMETIC], 's')} here, its "
        f"{quantity(work.moved_bytes, 'bytes')} {quantity(placed.needs_s[BANDWIDTH], 's')}, starting a call "
        f"{quantity(placed.needs_s[OVERHEAD], 's')}, and at twice the size it took {digits(longer)} times as long"
    )
    agrees = (longer < math.sqrt(2)) == (placed.regime == OVERHEAD)
    return placed.regime if agrees else "", why


def _named(answer) -> Outcome:
    if not isinstance(answer, Mapping) or set(answer) != set(CALLS):
        form = 'dict(a="...", b="...", c=..., d=..., e=...)'
        return Outcome(INCORRECT, f"the answer names a regime for each letter: {form}.")
    named = {letter: str(word).strip().lower() for letter, word in answer.items()}
    if strange := sorted(set(named.values()) - set(REGIMES)):
        return Outcome(INCORRECT, f"the regimes are {', '.join(REGIMES)}, and not {', '.join(strange)}.")
    seen = _measured()
    if seen.reasons:
        return Outcome(CANNOT, f"this machine could not measure all of it: {'; '.join(seen.reasons.values())}.")
    truths = {letter: _truth(letter, seen) for letter in CALLS}
    wrong = [letter for letter, (regime, _) in truths.items() if regime not in ("", named[letter])]
    unsure = [letter for letter, (regime, _) in truths.items() if not regime]
    if wrong:
        first, *others = wrong
        also = f" Also not right: {', '.join(others)}." if others else ""
        return Outcome(INCORRECT, f"{first} is not {named[first]}: {truths[first][1]}.{also}")
    if unsure:
        why = f"{unsure[0]}: {truths[unsure[0]][1]}"
        return Outcome(CANNOT, f"nothing is wrong, but this machine does not follow the model for {why}. Check again.")
    return Outcome(CORRECT, "all five, and this machine agrees: twice the size changed each as its regime says.")


ROWS, INNER, PEAK, TB_PER_S = 64, 4096, 312.0, 2.0
FLOPS = 2 * ROWS * INNER * INNER
X_BYTES, MATRIX_BYTES = 2 * ROWS * INNER, 2 * INNER * INNER  # fp16 has two bytes for each number
INTENSITY = FLOPS / (X_BYTES + MATRIX_BYTES + X_BYTES)
MOST = INTENSITY * TB_PER_S
_READ_ONLY = "you divided by the bytes that are read: the result is written, and counts too."
_TWO_BYTES = "how many bytes does an fp16 number have?"
_most = numeric(
    MOST,
    "62.1 FLOP per byte lie left of the ridge at 156: bandwidth is the limit.",
    [
        (PEAK, "that is the arithmetic roof. Does the product have enough FLOPs to a byte for it?"),
        (PEAK / TB_PER_S, "that is the ridge, in FLOP per byte. Where does the product lie beside it?"),
        (INTENSITY, "that is FLOP per byte, or one FLOP for a multiply-add, which counts two."),
        (FLOPS / (X_BYTES + MATRIX_BYTES) * TB_PER_S, _READ_ONLY),
        (2 * MOST, _TWO_BYTES),
        (MOST / 2, _TWO_BYTES),
        (FLOPS / MATRIX_BYTES * TB_PER_S, "close: the rows and the result are bytes too, not the weights alone."),
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
        _most,
        (
            "2 m k n FLOPs; bytes of the rows, of the matrix and of the result.",
            "FLOP per byte times bytes a second is FLOP/s. The smaller of that and the arithmetic roof holds.",
        ),
        "min(312, 2 * 64 * 4096 * 4096 / (2 * (2 * 64 * 4096 + 4096 * 4096)) * 2)",
    ),
}
