"""A Result in one of the forms: `compared` for variants, `along` for numbers. Recorded machines stand beside it."""

import math
from collections.abc import Callable, Mapping, Sequence

from perflab.bench import machine, record
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result, label
from perflab.bench.units import quantity, step_of

from .canvas import BASE, LIMIT, LINES, OTHER, SUBJECT, times
from .forms import Line, Row, Value, comparison, curve
from .style import Picture
from .table import InsteadOfFigure


def _undrawn(result: Result, title: str) -> InsteadOfFigure:
    why = "; ".join(dict.fromkeys(result.reasons.values())) or result.stopped
    return InsteadOfFigure(f"Figure: {title}", f"{title}: not measured here ({why}).")


def compared(
    result: Result,
    title: str,
    sentence: str,
    *,
    metric: str | Mapping[str, str] = "",
    names: Mapping[object, str] | None = None,
    base: object = None,
    whole: float = 0.0,
) -> Picture | InsteadOfFigure:
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
            if not math.isfinite(e.mid):
                continue
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
) -> Picture | InsteadOfFigure:
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
        name = "this machine" if one.source == "here" else machine.processor(one.machine)
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


def _note(result: Result, other: Result | None) -> str:
    """Where the figures are from, and what thin lines are."""
    where = "This machine" if result.source == "here" else f"{machine.processor(result.machine)}, recorded"
    beside = f"; grey: {machine.processor(other.machine)}, recorded" if other is not None else ""
    return f"{where}{beside}. Thin lines: 95 % intervals." if not result.observed else f"{where}{beside}."


# -- the figure that a Result shows by itself


def drawn(result: Result) -> Picture | InsteadOfFigure | None:
    """The main metric of a result over its values, in words made from their names; None where a table says as much."""
    known = next((r for r in (result, *record.beside(result)) if r.measured), None)
    metrics = known.drawn if known else []
    if known is None or len(result.values) * len(metrics) < 3:
        return None
    what = " and ".join(_words(metric) for metric in metrics)
    title = f"{what[:1].upper()}{what[1:]} by {result.variable}"
    means = {value: known[metrics[0]].of(value).mid for value in known.measured}
    means = {value: x for value, x in means.items() if math.isfinite(x)}
    if not means:
        return _undrawn(result, title)
    low, high = min(means, key=means.get), max(means, key=means.get)
    unit = known[metrics[0]].unit
    sentence = f"From {quantity(means[low], unit)} ({low}) to {quantity(means[high], unit)} ({high})."
    if len(metrics) == 1 and all(_is_number(value) for value in known.measured):
        xs = [float(value) for value in known.measured]
        wide = {
            "log_x": min(xs) > 0 and max(xs) / min(xs) >= 8,
            "log_y": min(means.values()) > 0 and max(means.values()) / min(means.values()) > 20,
        }
        return along(known, title, sentence, result.variable, _words(metrics[0]), metric=metrics[0], **wide)
    return compared(known, title, sentence, metric={m: _words(m) for m in metrics} if len(metrics) > 1 else metrics[0])


def _words(metric: str) -> str:
    """A metric's name in words: "images a second", "time of an item"."""
    if metric.endswith("_per_s"):
        return f"{metric.removesuffix('_per_s').replace('_', ' ')} a second"
    for ending in ("_s", "_bytes", "_flops", "_percent", "_db"):
        metric = metric.removesuffix(ending)
    return metric.replace("_", " ")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
