"""A Result as a table, a figure and a line of provenance, with recorded machines beside it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from perflab.bench import record
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result
from perflab.bench.units import digits, quantity, step_of, unit_of

from . import style
from .table import Html, cell
from .table import table as html_table


def display_table(result: Result):
    """Show the table of a Result alone, where a figure would say nothing more."""
    from IPython.display import display

    display({"text/plain": repr(result), "text/html": table(result, record.beside(result))}, raw=True)


def display_result(result: Result):
    """Show a Result in a notebook: its table, then its figure."""
    from IPython.display import display

    display_table(result)
    beside = record.beside(result)
    if len(result.values) > 1 and any(r.measured for r in (result, *beside)):  # one value is no figure
        display(picture(result, beside=beside))


def table(result: Result, beside: Sequence[Result] = ()) -> str:
    """The summary as HTML: this result's rows, then in grey those of recorded machines, then provenance."""
    nothing_here = all(v in result.reasons for v in result.values)
    rows = [] if nothing_here and beside else result.summary()
    colours = {}
    for recorded in beside:
        for row in recorded.summary():
            name = f"{cell(row[result.variable])} <i>({cell(recorded.source)})</i>"
            colours[len(rows)] = style.RECORDED
            rows.append(row | {result.variable: Html(name)})
    small = (f'<p style="color:{style.RECORDED}"><small>{cell(r.provenance)}</small></p>' for r in beside)
    return html_table(rows, [result.provenance], colours) + "".join(small)


class Series(NamedTuple):
    """One row of points in a figure: a metric of one result, over its values."""

    name: str
    colour: str
    points: dict[str, Estimate]


@style.styled
def picture(
    result: Result,
    metric: str | None = None,
    beside: Sequence[Result] | None = None,
    bound: tuple[float, str] | None = None,
) -> style.Picture:
    """A metric over the values: this machine in colour with its interval, recorded machines in grey.

    Without `metric`, those that the result shows. `bound` is a dashed line: its height in the metric's
    unit, and its name.
    """
    beside = record.beside(result) if beside is None else beside
    metrics = [metric] if metric else next((r.drawn for r in (result, *beside) if r.measured), [])
    shown = [r for r in (result, *beside) if r.measured]
    series = [_series(r, m, k, len(metrics)) for r in shown for k, m in enumerate(metrics) if m in r.metrics]
    if len(result.values) > 2 and _are_numbers(result.values) and len(metrics) == 1:
        fig, ax = _over_numbers(result, metrics[0], series, bound)
    else:
        fig, ax = _by_label(result, metrics, series, bound)
    if result.source != "here":
        ax.set_title(f"recorded on {', '.join(sorted({r.source for r in shown}))}", color=style.RECORDED)
    over = f"{' and '.join(metrics)} for {result.variable} = {', '.join(result.values)}"
    marks = "" if result.observed else "; points are centres over the rounds, bars 95 % intervals"
    return style.Picture.of(fig, f"{over}{marks}.")


def _series(r: Result, metric: str, k: int, of: int) -> Series:
    machine, colour = ("this machine", style.HERE) if r.source == "here" else (r.source, style.RECORDED)
    points = {v: r[metric].of(v) for v in r.measured if r[metric].rounds.get(v)}
    return Series(metric, style.PARTS[k], points) if of > 1 else Series(machine, colour, points)


def _are_numbers(names: Sequence[str]) -> bool:
    try:
        return all(math.isfinite(float(name)) for name in names)
    except ValueError:
        return False


class Scale(NamedTuple):
    """How a figure shows its metric: divided by `factor`, in `unit`; `wide`: its figures are far apart."""

    factor: float
    unit: str
    wide: bool

    @classmethod
    def of(cls, series: Sequence[Series], bound: tuple[float, str] | None, unit: str) -> "Scale":
        mids = [e.mid for s in series for e in s.points.values()]
        wide = len(mids) > 1 and min(mids) > 0 and max(mids) / min(mids) > 20
        return cls(*step_of(max([*mids, *([bound[0]] if bound else [])]), unit), wide)

    def whisker(self, e: Estimate) -> list[list[float]]:
        """The interval below and above the centre, as matplotlib takes it; nothing where there is none."""
        known = math.isfinite(e.lo + e.hi)
        return [[(e.mid - e.lo) / self.factor], [(e.hi - e.mid) / self.factor]] if known else [[0], [0]]

    def axis(self, metrics: Sequence[str]) -> str:
        """The label of the axis: what is shown, and its unit."""
        if metrics[0].endswith("_per_s") or self.unit == "%":
            return self.unit
        name = metrics[0].removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        if len(metrics) > 1:
            name = "time" if metrics[0].endswith("_s") else ""
        return f"{name} ({self.unit})".strip() if self.unit else name


def _over_numbers(result: Result, metric: str, series: Sequence[Series], bound):
    fig, ax = style.figure()
    scale = Scale.of(series, bound, unit_of(metric))
    for s in series:
        points = sorted((float(v), e) for v, e in s.points.items())
        xs, ys = [x for x, _ in points], [e.mid / scale.factor for _, e in points]
        ax.plot(xs, ys, "o-", color=s.colour, markersize=4)
        for x, e in points:
            ax.errorbar([x], [e.mid / scale.factor], scale.whisker(e), color=s.colour, capsize=2, linewidth=1)
        ax.annotate(s.name, (xs[-1], ys[-1]), (6, 0), textcoords="offset points", color=s.colour, va="center")
    xs = sorted(float(v) for v in result.values)
    if min(xs) > 0 and xs[-1] / xs[0] >= 8:
        ax.set_xscale("log", base=2)
    ax.set_xticks(xs, [f"{x:g}" if abs(x) < 1e6 else quantity(x, "") for x in xs])
    ax.minorticks_off()
    if scale.wide:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if bound:
        height = bound[0] / scale.factor
        ax.axhline(height, color=style.BOUND, linestyle="--")
        ax.annotate(bound[1], (xs[0], height), (0, 3), textcoords="offset points", color=style.BOUND)
    ax.set_xlabel(result.variable)
    ax.set_ylabel(scale.axis([metric]))
    ax.margins(x=0.14)
    return fig, ax


def _by_label(result: Result, metrics: Sequence[str], series: Sequence[Series], bound):
    names = [v for v in result.values if any(v in s.points for s in series)]
    fig, ax = style.figure(height=0.9 + 0.42 * len(names) * max(1, len(series)) ** 0.7)
    metric_unit = unit_of(metrics[0])
    scale = Scale.of(series, bound, metric_unit)
    for k, s in enumerate(series):
        shift = (k - (len(series) - 1) / 2) * 0.8 / len(series)
        for row, e in [(names.index(v), e) for v, e in s.points.items() if v in names]:  # a machine may know others
            x, y = e.mid / scale.factor, row + shift
            ax.errorbar([x], [y], xerr=scale.whisker(e), fmt="o", color=s.colour, capsize=3, markersize=6)
            # Far apart, each figure has the prefix that it reads best with.
            text = quantity(e.mid, metric_unit) if scale.wide or not scale.unit else f"{digits(x)} {scale.unit}"
            name = f" ({s.name})" if y < 0.5 and len(series) > 1 else ""
            ax.annotate(text + name, (x, y), (0, 6), textcoords="offset points", color=s.colour, fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    ax.grid(axis="y", visible=False)
    if scale.unit == "%":
        ax.set_xlim(0, 118)
    elif scale.wide:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        ax.xaxis.set_minor_formatter(lambda x, _: "")  # its labels would overlap
        ax.margins(x=0.15)
    else:
        tops = [x for s in series for e in s.points.values() for x in (e.mid, e.hi) if math.isfinite(x)]
        ax.set_xlim(0, max(tops) / scale.factor * 1.3 or 1)
    if bound:
        x = bound[0] / scale.factor
        ax.axvline(x, color=style.BOUND, linestyle="--")
        ax.annotate(bound[1], (x, -0.6), (3, 0), textcoords="offset points", color=style.BOUND, fontsize=9)
    ax.set_xlabel(scale.axis(metrics))
    return fig, ax
