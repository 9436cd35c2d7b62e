"""Is the model of `roofline.place` right for an operator? Two changes tell: twice the rows, half the bytes.

Twice the rows take twice the time, unless starting the call is what takes it. Half the bytes, by a shorter
format, take half the time only where bytes are what takes it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perflab.bench.result import Result
from perflab.bench.units import digits, quantity
from perflab.show.table import Answer, table

from .gpus import Roofs
from .operators import HALF, OPERATORS, SIZES, TWICE, OperatorCall, grid, label
from .roofline import ARITHMETIC, BANDWIDTH, OVERHEAD, Placed, Reached, place


@dataclass(frozen=True)
class RegimeCheck:
    """One operator at one size: where the model puts it, and what changing it did, as ratios of times.

    time_s, twice and half are nan where they were not measured. `bytes_agree`: is what half the bytes did
    nearest, as a ratio, to what this regime says?
    """

    label: str
    call: OperatorCall
    placed: Placed
    time_s: float
    twice: float
    half: float
    bytes_agree: bool

    @property
    def known(self) -> bool:
        return math.isfinite(self.time_s + self.twice + self.half)

    @property
    def size_agrees(self) -> bool:
        """Did twice the rows change the time as the regime says? Nearer to the same, as a ratio, is the same."""
        flat = self.twice < math.sqrt(2)
        return flat == (self.placed.regime == OVERHEAD)

    @property
    def beats_the_copy(self) -> bool:
        """It moved its bytes faster than a copy from memory can: they came from a cache."""
        return self.placed.cached and self.time_s < self.placed.needs_s[BANDWIDTH]


def checks(result: Result, roofs: Roofs) -> list[RegimeCheck]:
    """The model against both changes, for every operator and size of a study of `operators.grid(...)`.

    The machine of the result says what it ran on. Starting a call takes as long as the smallest add.
    """
    calls, time = calls_of(result), result["time_s"]
    overhead_s = time.of("add small").mid
    rows = []
    for operator, size in itertools.product(OPERATORS, SIZES):
        name = label(operator, size)
        if name in result.values:
            call = calls[name]
            placed = place(call.work, roofs, call.roof, overhead_s)
            twice, half = (time.ratio(label(operator, size, change), name).mid for change in (TWICE, HALF))
            agrees = _half_agrees(half, placed.regime, call, roofs)
            rows.append(RegimeCheck(name, call, placed, time.of(name).mid, twice, half, agrees))
    return rows


def calls_of(result: Result) -> dict[str, OperatorCall]:
    """The calls of a study of `operators.grid(...)`, as they were on the machine that it ran on."""
    return grid(on="cuda" if result.machine.get("cuda") else "cpu")


def _half_agrees(half: float, regime: str, call: OperatorCall, roofs: Roofs) -> bool:
    """Is what bf16 in place of fp32 did to the time nearest, as a ratio, to what this regime says?"""
    tensor_cores = call.columns and "bf16" in roofs.peaks  # only products have another arithmetic roof
    by_format = roofs.peaks["fp32"] / roofs.peaks["bf16"] if tensor_cores else 1.0
    expected = {OVERHEAD: 1.0, BANDWIDTH: 0.5, ARITHMETIC: by_format}
    off = {name: abs(math.log(half / ratio)) for name, ratio in expected.items()}
    return off[regime] <= min(off.values()) + 1e-9


def raised(roofs: Roofs, result: Result) -> Roofs:
    """Roofs no lower than what a study of `operators.grid()` reached: a roof is the best that was seen.

    Between two studies others may have taken a part of the machine, and points would lie above their roof.
    A copy that fits the last cache says nothing of memory, and raises nothing.
    """
    calls, time = calls_of(result), result["time_s"]
    peaks, bytes_per_s, copied = dict(roofs.peaks), roofs.bytes_per_s, calls["copy large"].work.moved_bytes
    for name in ("matmul large", label("matmul", "large", HALF)):
        call = calls[name]
        reached = call.work.flops / time.of(name).mid
        peaks[call.dtype] = max(peaks.get(call.dtype, 0), reached)  # nan, what was not measured, is not larger
    if roofs.cache_bytes is None or copied > roofs.cache_bytes:
        bytes_per_s = max(bytes_per_s, copied / time.of("copy large").mid)
    return replace(roofs, bytes_per_s=bytes_per_s, peaks=peaks)


@dataclass(frozen=True)
class Verdicts(Answer):
    """Checks as a table. The plain text is the same on every machine."""

    result: Result
    checks: Sequence[RegimeCheck]

    def __repr__(self):
        return f"Regimes of {', '.join(OPERATORS)} by size, and what two changes did to their times"

    def rows(self) -> list[dict]:
        return [self._row(check) for check in self.checks]

    def html(self) -> str:
        marks = (
            "Yes: the change did to the time what that regime says; no: it did something else. "
            "*: faster than a copy from memory, so that bytes came from a cache."
        )
        return table(self.rows(), [f"{marks} {self.result.provenance}"])

    def _row(self, check: RegimeCheck) -> dict[str, str]:
        row = {
            "operator": check.label,
            "x": f"{check.call.rows} x {check.call.n}",
            "FLOP/byte": digits(check.placed.intensity),
            "the model says": check.placed.regime,
            "at least": quantity(check.placed.bound_s, "s"),
        }
        if not check.known:
            return row | {"measured": self.result["time_s"].of(check.label).why}
        cached = "*" if check.beats_the_copy else ""
        return row | {
            "measured": f"{quantity(check.time_s, 's')}{cached}",
            TWICE: f"time x {digits(check.twice)}: {'yes' if check.size_agrees else 'no'}",
            HALF: f"time x {digits(check.half)}: {'yes' if check.bytes_agree else 'no'}",
        }


def points(found: Sequence[RegimeCheck]) -> list[Reached]:
    """What was reached, for the picture."""
    known = [check for check in found if check.known]
    return [Reached(c.call.operator, c.placed.intensity, c.call.work.flops / c.time_s) for c in known]
