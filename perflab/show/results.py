"""A Result in one of the forms: `compared` for variants, `along` for numbers. Recorded machines stand beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perflab.bench import record
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result, label
from perflab.bench.units import quantity, step_of

from .canvas import BASE, LIMIT, LINES, OTHER, SUBJECT, times
from .forms import Line, Row, Value, comparison, curve
from .style import Picture
from .table import Answer


@dataclass(frozen=True)
class Undrawn(Answer):
    """What stands in place of a figure where nothing was measured: its title, and why."""

    title: str
    why: str

    def __repr__(self):
        return f"Figure: {self.title}"

    def __str__(self):
        return f"{self.title}: not measured here ({self.why})."


def _undrawn(result: Result, title: str) -> Undrawn:
    return Undrawn(title, "; ".join(dict.fromkeys(result.reasons.values())) or result.stopped)


def compared(
    result: Result,
    title: str,
    sentence: str,
    *,
    metric: str | Mapping[str, str] = "",
    names: Mapping[object, str] | None = None,
    base: object = None,
    whole: float = 0.0,
) -> Picture | Undrawn:
    """The values of a result as bars, each metric with the unit of its name.

    metric: its main one by default; several, each with its words, make a group of bars for each value.
    names: values in the reader's words. base: the value that the factors at the right are counted from; it is light.
    """
    if not result.measured:
        return _undrawn(result, title)
    words = {label(value): text for value, text in (names or {}).items()}
    metrics = dict(metric) if isinstance(metric, Mapping) else {metric or result.drawn[0]: ""}
    other = next(iter(record.beside(result)), None) if result.source == "here" else None
    rows = []
    for value in result.measured:
        for number, (name, text) in enumerate(metrics.items()):
            e = result[name].of(value)
            row = Row(text or words.get(value, value), _value(e), quantity(e.mid, e.unit))
            if text:
                row = row._replace(group=words.get(value, value), colour=LINES[(number + 1) % 2])
            if base is not None:
                gain = 1.0 if value == label(base) else result.ratio(base, value).mid
                row = row._replace(side=times(gain), colour=BASE if value == label(base) else SUBJECT)
            if other is not None and value in other.measured and name in other.metrics:
                seen = other[name].of(value)
                row = row._replace(other=_value(seen), other_text=f"{quantity(seen.mid, seen.unit)} there")
            rows.append(row)
    side = "speed" if base is not None else ""
    return comparison(title, sentence, rows, note=_note(result, other), side=side, whole=whole)


def along(
    result: Result,
    title: str,
    sentence: str,
    x_name: str,
    y_name: str,
    *,
    metric: str = "",
    lines: Mapping[str, Callable[[float], float]] | None = None,
    log_x: bool = True,
    log_y: bool = False,
    x_text: Callable[[float], str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Picture | Undrawn:
    """A metric over values that are numbers. lines: models and bounds by name, as functions of the value, dashed."""
    if not result.measured:
        return _undrawn(result, title)
    metric = metric or result.drawn[0]
    shown = [result, *(record.beside(result) if result.source == "here" else [])]
    xs = [float(value) for value in result.measured]
    factor, unit = step_of(max(result[metric].of(value).mid for value in result.measured), result[metric].unit)
    drawn = []
    for one in shown:
        points = [(float(v), _value(one[metric].of(v), factor)) for v in one.measured if metric in one.metrics]
        name = "this machine" if one.source == "here" else _machine(one)
        drawn.append(Line(name, points, SUBJECT if one is result else OTHER))
    for name, formula in (lines or {}).items():
        drawn.append(Line(name, [(x, Value(formula(x) / factor)) for x in xs], LIMIT, limit=True))
    return curve(
        title,
        sentence,
        drawn,
        x_name,
        f"{y_name} ({unit})",
        note=_note(result, None),
        log_x=log_x,
        log_y=log_y,
        marks=marks,
        **({"x_text": x_text} if x_text else {}),
    )


def _value(e: Estimate, factor: float = 1.0) -> Value:
    return Value(e.mid / factor, e.lo / factor, e.hi / factor)


def _machine(result: Result) -> str:
    facts = result.machine
    return (facts.get("gpus") or [facts.get("cpu", result.source)])[0]


def _note(result: Result, other: Result | None) -> str:
    """Where the figures are from, and what thin lines are."""
    where = "This machine" if result.source == "here" else f"{_machine(result)}, recorded"
    beside = f"; grey: {_machine(other)}, recorded" if other is not None else ""
    return f"{where}{beside}. Thin lines: 95 % intervals." if not result.observed else f"{where}{beside}."
