"""What samples say of a quantity, and what that says of a threshold. Pure arithmetic: no clock, no file."""

import functools
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .units import digits, quantity, step_of

HOLDS, NOT, CANNOT = "HOLDS HERE", "DOES NOT HOLD HERE", "CANNOT TELL"
LEVEL = 0.95
FLOOR = 0.02  # a smaller relative effect is not called a difference
LEAST = 6  # rounds: below, no 95 % interval exists
MARGIN = 1.5  # by which a threshold must be cleared where the machine was crowded, or rounds were too few


@functools.cache
def _dropped(n: int, level: float) -> int:
    """How many ordered Walsh averages an interval leaves out at each end: the exact signed-rank law."""
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1
    for rank in range(1, n + 1):
        ways[rank:] = ways[rank:] + ways[:-rank].copy()
    return int(np.searchsorted(np.cumsum(ways) / 2.0**n, (1 - level) / 2, side="right"))


def interval(samples: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Centre and confidence limits of `samples`: the Hodges-Lehmann estimate with its exact interval.

    Source: Hodges and Lehmann 1963, DOI 10.1214/aoms/1177704172; Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, section 3.3. Below six samples no 95 % interval exists: it is
    infinite. Without samples the centre is nan.
    """
    d = np.asarray(samples, float)
    if not len(d):
        return math.nan, -math.inf, math.inf
    i, j = np.triu_indices(len(d))
    walsh = np.sort((d[i] + d[j]) / 2)
    k = _dropped(len(d), level)
    return float(np.median(walsh)), float(walsh[k - 1] if k else -np.inf), float(walsh[-k] if k else np.inf)


class _Shown:
    """Shown in a notebook by one sentence, figures included."""

    def _repr_html_(self):
        return f"<p>{html.escape(self._sentence())}</p>"

    def _sentence(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Finding(_Shown):
    """A three-valued answer to one threshold: HOLDS HERE, DOES NOT HOLD HERE or CANNOT TELL.

    `rule` is stable text (no measured figure), `seen` holds the figures, `exact` says that nothing
    was timed, `source` is "here" or the recorded machine that the figures come from. Findings combine
    with `&`, `|` and `~` by Kleene's three-valued logic.
    """

    state: str
    rule: str
    seen: str = ""
    exact: bool = False
    source: str = "here"

    def __bool__(self):
        raise TypeError("a finding has three values: compare .state, or combine findings with &, | and ~")

    def __and__(self, other: "Finding") -> "Finding":
        state = NOT if NOT in (self.state, other.state) else CANNOT
        return self._with(other, "and", HOLDS if self.state == other.state == HOLDS else state)

    def __or__(self, other: "Finding") -> "Finding":
        state = HOLDS if HOLDS in (self.state, other.state) else CANNOT
        return self._with(other, "or", NOT if self.state == other.state == NOT else state)

    def __invert__(self) -> "Finding":
        state = {HOLDS: NOT, NOT: HOLDS, CANNOT: CANNOT}[self.state]
        return replace(self, state=state, rule=f"not ({self.rule})")

    def _with(self, other: "Finding", word: str, state: str) -> "Finding":
        seen = "; ".join(s for s in (self.seen, other.seen) if s)
        source = self.source if other.source == "here" else other.source
        return Finding(state, f"{self.rule} {word} {other.rule}", seen, self.exact and other.exact, source)

    def __repr__(self):
        return f"{self.rule}: {self.state}" if self.exact else f"{self.rule} (timed)"

    def __str__(self):
        return f"{self.rule}: {self.state} ({self.seen})"


@dataclass(frozen=True)
class Estimate(_Shown):
    """A quantity with its 95 % interval: `mid`, `lo`, `hi`, from `n` rounds.

    `exact` marks a count: no interval, `lo == mid == hi`. `why` says why there is nothing (a value that
    failed or was never measured); every finding is then CANNOT TELL with that reason. `crowded` says that
    others took the cores: a threshold is then held or refused only where the whole interval clears it by
    MARGIN. With fewer than LEAST rounds, but two, the lowest and highest figure (`extremes`) must clear it so.
    """

    mid: float
    lo: float
    hi: float
    n: int
    what: str = "value"
    unit: str = ""
    exact: bool = False
    why: str = ""
    source: str = "here"
    crowded: str = ""
    extremes: tuple[float, float] = (-math.inf, math.inf)

    @classmethod
    def of(cls, samples: Sequence[float], what: str, unit: str = "", source: str = "here") -> "Estimate":
        extremes = (min(samples), max(samples)) if len(samples) else (-math.inf, math.inf)
        return cls(*interval(samples), len(samples), what, unit, source=source, extremes=extremes)

    @classmethod
    def of_ratio(cls, log_ratios: Sequence[float], what: str, source: str = "here") -> "Estimate":
        logs = cls.of(log_ratios, what, source=source)
        mid, lo, hi, low, high = (
            math.exp(x) if x < 700 else math.inf for x in (logs.mid, logs.lo, logs.hi, *logs.extremes)
        )
        return replace(logs, mid=mid, lo=lo, hi=hi, extremes=(low, high))

    @classmethod
    def count(cls, x: float | str, what: str, unit: str = "", source: str = "here") -> "Estimate":
        return cls(x, x, x, 1, what, unit, exact=True, source=source)

    @classmethod
    def missing(cls, what: str, why: str, source: str = "here") -> "Estimate":
        return cls(math.nan, -math.inf, math.inf, 0, what, why=why, source=source)

    def at_least(self, x: float) -> Finding:
        return self._finding(self._between(x, math.inf), f"at least {self._plain(x)}")

    def at_most(self, x: float) -> Finding:
        return self._finding(self._between(-math.inf, x), f"at most {self._plain(x)}")

    def within(self, low: float, high: float) -> Finding:
        if low > high:
            raise ValueError(f"within({low}, {high}): the first limit is the lower one")
        return self._finding(self._between(low, high), f"within {self._plain(low)} and {self._plain(high)}")

    def _between(self, low: float, high: float) -> str:
        """Does the quantity lie between two limits, on neither side too near to one for so few or crowded rounds?"""
        few = self.n < LEAST and not self.exact
        if few and self.n < 2:
            return CANNOT
        lo, hi = self.extremes if few else (self.lo, self.hi)
        margin = MARGIN if few or self.crowded else 1.0
        if lo >= _raised(low, margin) and hi <= _raised(high, 1 / margin):
            return HOLDS
        return NOT if hi < _raised(low, 1 / margin) or lo > _raised(high, margin) else CANNOT

    def equals(self, x: float) -> Finding:
        """For counts. A timed quantity equals nothing exactly: ask `within`."""
        if not (self.exact or self.why):
            raise ValueError(f"{self.what} was timed, and a timed figure equals nothing exactly: use within(...)")
        state = CANNOT if self.why else HOLDS if self.mid == x else NOT
        return self._finding(state, f"equal to {self._plain(x)}")

    def differs(self, floor: float = FLOOR) -> Finding:
        """Of a ratio: does it lie beyond `floor` (relative) on either side of 1?"""
        beyond = self.lo > 1 + floor or self.hi < 1 / (1 + floor)
        alike = self.lo >= 1 / (1 + floor) and self.hi <= 1 + floor
        state = HOLDS if beyond else NOT if alike else CANNOT
        return self._finding(state, f"different from 1 by more than {floor:.0%}")

    def _plain(self, x: float | str) -> str:
        if isinstance(x, str):
            return x
        return quantity(x, self.unit) if self.unit else f"{x:,.0f}" if x == round(x) else f"{x:g}"

    def _finding(self, state: str, threshold: str) -> Finding:
        seen = f"{self}; {self.crowded}" if state == CANNOT and self.crowded else str(self)
        return Finding(state, f"{self.what} {threshold}", seen, self.exact, self.source)

    @property
    def limits(self) -> str:
        """The interval as text, in the unit of the centre: "12.1 to 12.9"; or that there is none yet."""
        if self.n < LEAST:
            return f"no interval from {self.n} round{'s' * (self.n != 1)}"
        factor, _ = step_of(self.mid, self.unit)
        return f"{digits(self.lo / factor)} to {digits(self.hi / factor)}"

    def __str__(self):
        if self.why:
            return self.why
        return self._plain(self.mid) if self.exact else f"{quantity(self.mid, self.unit)} ({self.limits})"

    def __repr__(self):
        return str(self) if self.exact else f"{self.what} (timed)"

    def _sentence(self) -> str:
        return f"{self.what}: {self}"


def _raised(limit: float, factor: float) -> float:
    """A limit moved up by a factor, down by one below 1, on either side of zero."""
    return limit * factor if limit > 0 else limit / factor


@dataclass(frozen=True)
class Knee(_Shown):
    """The smallest values that may suffice. One value: found. Several: the rounds do not tell them apart."""

    values: tuple[str, ...]
    why: str = ""
    source: str = "here"
    study: str = ""

    def within(self, low: float, high: float) -> Finding:
        """Does the knee lie between `low` and `high`? Only when every candidate says the same."""
        inside = {low <= float(v) <= high for v in self.values}
        state = CANNOT if len(inside) != 1 else HOLDS if inside.pop() else NOT
        return Finding(state, f"{self._name} within {low:g} and {high:g}", str(self), source=self.source)

    @property
    def _name(self) -> str:
        return f"knee of {self.study}" if self.study else "knee"

    def __repr__(self):
        return f"{self._name} (timed)"

    def __str__(self):
        return f"{self._name} at {' or '.join(self.values) or 'unknown'}{f' ({self.why})' if self.why else ''}"
