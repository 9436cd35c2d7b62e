"""What was measured: raw samples with their provenance. Every derived figure is computed, never stored."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import truediv

import numpy as np

from perflab.errors import first_line

from . import machine
from .conditions import CROWDED
from .estimate import HOLDS, NOT, Estimate, Knee
from .units import quantity, unit_of

SCHEMA = 1
TWIN = "(again)"


def label(value) -> str:
    """The name of a value in tables, figures and files: `None` is a value like another."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Metric:
    """One measured quantity of a Result, by value and round; `result["wait_s"]` gives it."""

    name: str
    unit: str
    rounds: Mapping[str, Mapping[int, float]]  # label -> round -> the round's figure
    reasons: Mapping[str, str]
    source: str = "here"
    crowded: str = ""

    def of(self, value) -> Estimate:
        """The quantity at `value`, with its interval over the rounds."""
        return _combined(lambda x: x, [(self, value)], f"{self.name} of {label(value)}", self.unit)

    def ratio(self, a, b) -> Estimate:
        """`a` over `b`, always that way, from the rounds in which both were measured."""
        return _combined(truediv, [(self, a), (self, b)], f"{self.name} of {label(a)} / {label(b)}")

    def over(self, other: "Metric", value) -> Estimate:
        """This quantity over another of the same value, paired by round: a share, a rate, a part."""
        return _combined(truediv, [(self, value), (other, value)], f"{self.name} / {other.name} of {label(value)}")


def _combined(formula: Callable[..., float], terms: Sequence[tuple[Metric, object]], what: str, unit: str = ""):
    """The Estimate of a formula whose terms are figures of one round."""
    of_terms = [metric.rounds.get(label(value), {}) for metric, value in terms]
    source, crowded = terms[0][0].source, terms[0][0].crowded
    for (metric, value), figures in zip(terms, of_terms, strict=True):
        if not figures:
            why = metric.reasons.get(label(value)) or "it is not among the values"
            missing = Estimate.missing(what, f"{label(value)} was not measured: {why}", source)
            return replace(missing, unit=unit)
    shared = sorted(set.intersection(*map(set, of_terms)))
    if not shared:
        return Estimate.missing(what, "no round has all of it", source)
    try:
        figures = [float(formula(*(rounds[r] for rounds in of_terms))) for r in shared]
    except (ArithmeticError, ValueError) as error:
        return Estimate.missing(what, f"{what} cannot be computed: {first_line(error)}", source)
    if min(figures) > 0:  # on a log scale, so that a ratio and its inverse, a rate and its time, say the same
        estimate = Estimate.of_ratio([math.log(x) for x in figures], what, source)
    else:
        estimate = Estimate.of(figures, what, source=source)
    return replace(estimate, unit=unit, crowded=crowded)


@dataclass
class Result:
    """Rows (value, round, metric, unit, sample, status, source) and where they come from.

    `samples[metric][label]` is a list of (round, figures of that round); `counts[label]` holds exact
    figures; `reasons[label]` says why a value has no rows. `source` is "here" or a recorded machine.
    """

    study: str
    version: int
    variable: str
    values: list[str]
    samples: dict[str, dict[str, list[tuple[int, list[float]]]]] = field(default_factory=dict)
    counts: dict[str, dict] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    fixed: dict = field(default_factory=dict)
    per: str | None = None
    work: dict[str, float] = field(default_factory=dict)
    shows: list[str] = field(default_factory=list)  # the metrics of its figure, where not the main one
    machine: dict = field(default_factory=dict)
    conditions: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    digest: str = ""
    taken: str = ""
    stopped: str = ""
    seconds: float = 0.0
    source: str = "here"
    asked: list[str] = field(default_factory=list)  # what a stand-in could not measure here, and why

    # -- figures

    def __getitem__(self, metric: str) -> Metric:
        if metric == self.rate_name and self.samples:
            times = self["time_s"].rounds
            rounds = {v: {r: self.work[v] / t for r, t in by_round.items()} for v, by_round in times.items()}
        elif metric in self.samples:
            rounds = {
                v: {r: float(np.median(figures)) for r, figures in rows if figures}
                for v, rows in self.samples[metric].items()
            }
        elif not self.samples:  # nothing was measured: every question gets that answer
            rounds = {}
        elif any(metric in counted for counted in self.counts.values()):
            raise KeyError(f"{metric} is a count, without rounds: result.count({metric!r}, value)")
        else:
            raise KeyError(f"{self.study} has no metric {metric!r}; it has {', '.join(self.metrics)}")
        return Metric(metric, unit_of(metric), rounds, self.reasons, self.source, self.crowded)

    @property
    def rate_name(self) -> str | None:
        return f"{self.per}{'es' if self.per.endswith('ch') else 's'}_per_s" if self.per else None

    @cached_property
    def metrics(self) -> list[str]:
        """The timed metrics, the derived rate last."""
        return [*self.samples, *([self.rate_name] if self.per and "time_s" in self.samples else [])]

    @property
    def drawn(self) -> list[str]:
        """The metrics that its figure shows: those asked for, else the rate where work is known, else the time."""
        return self.shows or self.metrics[-1:] if self.per or self.shows else self.metrics[:1]

    def ratio(self, a, b) -> Estimate:
        """Time of `a` over time of `b` for the same work: 2 says that `b` is twice as fast."""
        if self.per:
            return replace(self[self.rate_name].ratio(b, a), what=f"time of {label(a)} / {label(b)}")
        return self["time_s"].ratio(a, b)

    def combine(self, formula: Callable[..., float], *terms: tuple[str, object], what: str, unit: str = "") -> Estimate:
        """A formula over paired rounds: `formula` gets a figure for each of `terms`, a (metric, value), of one round.

        result.combine(lambda serial, both: serial - both, ("time_s", "in turn"), ("time_s", "overlapped"),
        what="saved", unit="s"). Rounds in which a term is missing are left out. Where the formula is positive in
        every round, it is averaged on a log scale, so that a ratio and its inverse say the same. Where it divides
        by zero or cannot be computed, the Estimate says so.
        """
        return _combined(formula, [(self[metric], value) for metric, value in terms], what, unit)

    def count(self, name: str, value) -> Estimate:
        """An exact figure of one value."""
        counted = self.counts.get(label(value), {})
        what = f"{name} of {label(value)}"
        if name not in counted:
            return Estimate.missing(what, f"{name} was not counted for {label(value)}", self.source)
        return Estimate.count(counted[name], what, unit_of(name), self.source)

    @property
    def noise(self) -> Estimate:
        """The cheapest value against itself (A/A): how far from 1 chance alone takes a ratio here."""
        twin = next((v for v in self.samples.get("time_s", {}) if v.endswith(TWIN)), None)
        if twin is None:
            return Estimate.missing("noise", "no value was measured twice")
        return self["time_s"].ratio(twin, twin.removesuffix(TWIN).strip())

    @property
    def observed(self) -> bool:
        """Was it written down once, not measured in rounds?"""
        return self.stopped == "observed"

    @property
    def crowded(self) -> str:
        """Why absolute figures are doubtful (others took the cores), or "" when they are not."""
        taken = self.conditions.get("foreign_cores", 0.0)
        usable = self.machine.get("cores", 1)
        return f"other processes took {taken:.1f} of {usable} cores" if taken > CROWDED * usable else ""

    def knee(self, share: float = 0.9) -> Knee:
        """The smallest value that reaches `share` of the best rate, as the set of those it may be.

        When the work fills the cores and others take them too, the knee moves with the load, so that
        none is named.
        """
        rate = self[self.rate_name or "time_s"]
        typical = {v: float(np.median(list(rate.rounds[v].values()))) for v in self.measured}
        if not typical:
            return Knee((), "nothing was measured", self.source, self.study)
        if self.crowded and self.conditions.get("own_cores", 0) > 0.5:
            return Knee((), self.crowded, self.source, self.study)
        best = max(typical, key=typical.get) if self.per else min(typical, key=typical.get)
        candidates: list[str] = []
        for v in self.measured:
            ratio = replace(self.ratio(best, v), crowded="")  # the load that matters was asked for above
            state = HOLDS if v == best else ratio.at_least(share).state
            candidates += [v] * (state != NOT)
            if state == HOLDS:
                break
        return Knee(tuple(candidates), source=self.source, study=self.study)

    @property
    def measured(self) -> list[str]:
        """The values that have samples and did not fail."""
        first = self.samples.get("time_s") or next(iter(self.samples.values()), {})
        return [v for v in self.values if first.get(v) and v not in self.reasons]

    # -- rows

    def table(self):
        """All rows as a pandas DataFrame: value, round, metric, unit, sample, status, source."""
        import pandas as pd

        rows = [
            (v, r, metric, unit_of(metric), x, self.reasons.get(v, "ok"), self.source)
            for metric, by_value in self.samples.items()
            for v, rounds in by_value.items()
            for r, figures in rounds
            for x in figures
        ]
        rows += [
            (v, None, name, unit_of(name), x, "counted", self.source)
            for v, counted in self.counts.items()
            for name, x in counted.items()
        ]
        rows += [(v, None, "", "", None, why, self.source) for v, why in self.reasons.items()]
        columns = ["value", "round", "metric", "unit", "sample", "status", "source"]
        return pd.DataFrame(rows, columns=columns)

    def summary(self, metrics: Sequence[str] | None = None) -> list[dict[str, str]]:
        """One row of text per value: each metric with its interval, each count, what failed.

        Of the metrics, those that the result shows; all of them where it names none.
        """
        out = []
        for v in self.values:
            row = {self.variable: v}
            for name in metrics or self.shows or self.metrics:
                seen = self[name].of(v)
                row[name] = "" if seen.why else quantity(seen.mid, seen.unit) if self.observed else str(seen)
            row |= {name: _exact(name, x) for name, x in self.counts.get(v, {}).items()}
            if self.reasons:
                row["not measured"] = self.reasons.get(v, "")
            out.append(row)
        return out

    @property
    def provenance(self) -> str:
        """Where, when and how: the line under each table."""
        done = "Measured" if self.samples or not self.observed else "Counted"
        where = f"{done} here" if self.source == "here" else f"Recorded, not measured here ({self.source})"
        parts = [f"{where}: {machine.named(self.machine)}, {self.taken[:10]}"]
        rounds = max((len(rows) for rows in self.samples.get("time_s", {}).values()), default=0)
        if rounds and not self.observed:
            parts.append(f"{rounds} rounds, {self.settings.get('threads')} threads, stopped: {self.stopped}")
        if not self.noise.why:
            parts.append(f"A/A {self.noise}")
        if self.crowded:
            parts.append(self.crowded)
        if (waited := self.conditions.get("waited_s", 0)) > 1:
            parts.append(f"waited {waited:.0f} s for others to give up the seat")
        if self.conditions.get("throttled"):
            parts.append(f"throttled by {', '.join(self.conditions['throttled'])}")
        if self.conditions.get("neighbours"):
            parts.append(f"{self.conditions['neighbours']} other processes on the GPU")
        return "; ".join([*parts, *self.asked]) + "."

    # -- on disk

    def to_json(self) -> dict:
        return {k: v for k, v in asdict(self).items() if k not in ("source", "asked", "shows")}

    @classmethod
    def from_json(cls, data: dict, source: str = "here") -> "Result":
        return cls(**{k: v for k, v in data.items() if k not in ("schema", "name")}, source=source)

    # -- shown

    def __repr__(self):
        """Stable text: labels, units, structure and exact counts; no timed figure.

        Result 00.swap: loader = JPEG files, one cached batch
          timed: time_s (s), wait_s (s), images_per_s (images/s)
        """
        fixed = "".join(f"; {k} = {v}" for k, v in self.fixed.items())
        lines = [f"Result {self.study}: {self.variable} = {', '.join(self.values)}{fixed}"]
        if self.metrics:
            lines.append("  timed: " + ", ".join(f"{m} ({unit_of(m)})" for m in self.metrics))
        for v, counted in self.counts.items():
            lines.append(f"  {v}: " + ", ".join(f"{name} {_exact(name, x)}" for name, x in counted.items()))
        return "\n".join(lines)

    def __str__(self):
        rows = [", ".join(f"{k} {v}" for k, v in row.items() if v) for row in self.summary()]
        return "\n".join([f"{self.study}: {self.variable}", *(f"  {row}" for row in rows), self.provenance])


def _exact(name: str, x) -> str:
    unit = unit_of(name)
    return quantity(x, unit) if unit and isinstance(x, int | float) else f"{x:,}" if isinstance(x, int) else str(x)


Work = float | Callable[[object], float]
