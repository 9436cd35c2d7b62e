"""Is the model of `roofline.place` right for an operator? Two changes tell: twice the rows, half the bytes.

Twice the rows take twice the time, unless starting the call is what takes it. Half the bytes, by a shorter
format, take half the time only where bytes are what takes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perflab.bench.estimate import Estimate
from perflab.bench.result import Result
from perflab.bench.units import digits, quantity
from perflab.show import style
from perflab.show.table import Answer, table

from .gpus import Roofs
from .operators import CHANGES, OPERATORS, SIZES, OperatorCase
from .roofline import ARITHMETIC, BANDWIDTH, OVERHEAD, Placed, Reached, place
from .work import Work


@dataclass(frozen=True)
class RegimeCheck:
    """One operator at one size: where the model puts it, and what changing it did, as ratios of times.

    time_s, twice and half are nan where they were not measured. `half_by_regime` is what half the bytes
    would do in each regime.
    """

    case: OperatorCase
    work: Work
    placed: Placed
    time_s: float
    twice: float
    half: float
    half_by_regime: Mapping[str, float]

    @property
    def known(self) -> bool:
        return math.isfinite(self.time_s + self.twice + self.half)

    @property
    def size_agrees(self) -> bool:
        """Did twice the rows change the time as the regime says? Nearer to the same, as a ratio, is the same."""
        flat = self.twice < math.sqrt(2)
        return flat == (self.placed.regime == OVERHEAD)

    @property
    def bytes_agree(self) -> bool:
        """Is what half the bytes did nearest, as a ratio, to what this regime says?"""
        off = {regime: abs(math.log(self.half / x)) for regime, x in self.half_by_regime.items()}
        return off[self.placed.regime] <= min(off.values()) + 1e-9

    @property
    def beats_the_copy(self) -> bool:
        """It moved its bytes faster than a copy from memory can: they came from a cache."""
        return self.placed.cached and self.time_s < self.placed.bandwidth_s


def checks(result: Result, roofs: Roofs) -> list[RegimeCheck]:
    """The model against both changes, for every operator and size of a study of `operators.grid(...)`.

    The machine of the result says what it ran on. Starting a call takes as long as the smallest add.
    """
    time, on = result["time_s"], ran_on(result)
    overhead_s = time.of(OperatorCase("add", SIZES[0]).label).mid
    found = []
    for name in OPERATORS:
        for size in SIZES:
            case, twice, half = (OperatorCase(name, size, change) for change in CHANGES)
            if case.label not in result.values:
                continue
            work = case.work(on)
            placed = place(work, roofs, OPERATORS[name].roof(case.dtype), overhead_s)
            ratios = [time.ratio(changed.label, case.label).mid for changed in (twice, half)]
            seen_s = time.of(case.label).mid
            found.append(RegimeCheck(case, work, placed, seen_s, *ratios, _half_by_regime(name, roofs)))
    return found


def raised(roofs: Roofs, result: Result) -> Roofs:
    """Roofs no lower than what a study of `operators.grid()` reached: a roof is the best that was seen.

    Between two studies others may have taken a part of the machine, and points would lie above their roof.
    A copy that fits the last cache says nothing of memory, and raises nothing.
    """
    time, on = result["time_s"], ran_on(result)
    copy, product = OperatorCase("copy", SIZES[-1]), OperatorCase("matmul", SIZES[-1])
    moved, peaks = copy.work(on).moved_bytes, dict(roofs.peaks)
    cached = roofs.cache_bytes is not None and moved <= roofs.cache_bytes
    copied = 0 if cached else moved / time.of(copy.label).mid
    for case in (product, replace(product, change="half the bytes")):
        reached = case.work(on).flops / time.of(case.label).mid
        peaks[case.dtype] = _larger(peaks.get(case.dtype, 0), reached)
    return replace(roofs, bytes_per_s=_larger(roofs.bytes_per_s, copied), peaks=peaks)


def _larger(known: float, seen: float) -> float:
    """nan says that nothing was seen."""
    return seen if seen > known else known


def part_of_copy(result: Result, operator: str) -> Estimate:
    """bytes/s of a large operator over those of the large copy of the same rounds: 1 says as fast as a copy."""
    case, copy, on = OperatorCase(operator, SIZES[-1]), OperatorCase("copy", SIZES[-1]), ran_on(result)
    more = case.work(on).moved_bytes / copy.work(on).moved_bytes
    terms = ("time_s", copy.label), ("time_s", case.label)
    what = f"bytes/s of {case.label} / bytes/s of {copy.label}"
    return result.combine(lambda copy_s, operator_s: more * copy_s / operator_s, *terms, what=what)


def percent_of_roof(result: Result, case: OperatorCase, roofs: Roofs) -> Estimate:
    """FLOP/s reached by a case, in percent of the arithmetic roof of its format, with the interval of its time."""
    at_roof_s = case.work(ran_on(result)).flops / roofs.peaks[case.dtype]
    what = f"percent of the {case.dtype} roof of {case.label}"
    return result.combine(lambda seconds: 100 * at_roof_s / seconds, ("time_s", case.label), what=what, unit="%")


def ran_on(result: Result) -> str:
    """ "cuda" or "cpu": where a result's steps ran, by the machine that it names."""
    return "cuda" if result.machine.get("cuda") else "cpu"


def _half_by_regime(operator: str, roofs: Roofs) -> dict[str, float]:
    """What bf16 in place of fp32 does to the time in each regime: only products have another arithmetic roof."""
    by_regime = {OVERHEAD: 1.0, BANDWIDTH: 0.5, ARITHMETIC: 1.0}
    if operator == "matmul" and "bf16" in roofs.peaks:
        by_regime[ARITHMETIC] = roofs.peaks["fp32"] / roofs.peaks["bf16"]
    return by_regime


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
        rows, n = check.case.shape(ran_on(self.result))
        row = {
            "operator": check.case.label,
            "x": f"{rows} x {n}",
            "FLOP/byte": digits(check.placed.intensity),
            "the model says": check.placed.regime,
            "at least": quantity(check.placed.bound_s, "s"),
        }
        if not check.known:
            return row | {"measured": self.result["time_s"].of(check.case.label).why}
        _, twice, half = CHANGES
        row["measured"] = quantity(check.time_s, "s") + "*" * check.beats_the_copy
        row[twice] = _did(check.twice, check.size_agrees)
        row[half] = _did(check.half, check.bytes_agree)
        return row


def _did(ratio: float, agrees: bool) -> str:
    return f"time x {digits(ratio)}: {'yes' if agrees else 'no'}"


def lines(found: Sequence[RegimeCheck]) -> list[list[Reached]]:
    """For the picture: a line of points an operator, from its smallest to its largest size."""
    drawn = []
    for k, name in enumerate(OPERATORS):
        mine = [c for c in found if c.case.operator == name and c.known]
        drawn.append([Reached(name, c.placed.intensity, c.work.flops / c.time_s, style.PARTS[k]) for c in mine])
    return [line for line in drawn if line]
