"""A Result as a table, a figure and a line of provenance, with recorded machines beside it."""

import html
import math
from collections.abc import Sequence

from perflab.bench import machine, record
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result
from perflab.bench.units import digits, step_of

from . import style


def display_result(result: Result):
    """Show a Result in a notebook: its table, then its figure."""
    from IPython.display import display

    beside = record.beside(result)
    shown = {"text/plain": repr(result), "text/html": table(result, beside)}
    display(shown, raw=True)
    if sum(len(r.measured) for r in (result, *beside) if r.metrics) > 1:  # one point is no figure
        display(picture(result, beside=beside))


def table(result: Result, beside: Sequence[Result] = ()) -> str:
    """The summary as HTML: this result's rows, then in grey those of recorded machines, then provenance."""
    blocks = [result.summary()] if not all(v in result.reasons for v in result.values) or not beside else []
    head = list(dict.fromkeys(key for rows in [*blocks, *(r.summary() for r in beside)] for key in rows[0]))
    lines = ["<table><thead><tr>", *(f"<th>{_cell(key)}</th>" for key in head), "</tr></thead><tbody>"]
    for source, rows in [("", rows) for rows in blocks] + [(r.source, r.summary()) for r in beside]:
        colour = f' style="color:{style.RECORDED}"' if source else ""
        for row in rows:
            cells = [f"<td>{_cell(row.get(key, ''))}</td>" for key in head]
            if source:
                cells[0] = f"<td>{_cell(row[result.variable])} <i>({_cell(source)})</i></td>"
            lines += [f"<tr{colour}>", *cells, "</tr>"]
    lines += ["</tbody></table>", f"<p><small>{_cell(result.provenance)}</small></p>"]
    lines += [
        f'<p style="color:{style.RECORDED}"><small>{_cell(r.source)}: {_cell(r.provenance)}</small></p>' for r in beside
    ]
    return "".join(lines)


def _cell(text) -> str:
    return html.escape(str(text)).replace("_", "_<wbr>")


@style.styled
def picture(
    result: Result,
    metric: str | None = None,
    beside: Sequence[Result] | None = None,
    bound: tuple[float, str] | None = None,
) -> style.Picture:
    """The main metric over the values: this result in colour with its interval, recorded ones in grey.

    `bound` is a dashed line: its height in the metric's unit, and its name.
    """
    metric = metric or result.main
    beside = record.beside(result) if beside is None else beside
    series = [(r, style.HERE if r is result and r.source == "here" else style.RECORDED) for r in (result, *beside)]
    series = [(r, colour) for r, colour in series if metric in r.metrics and r.measured]
    seen = [(r, colour, {v: r[metric].of(v) for v in r.measured}) for r, colour in series]
    numeric = len(result.values) > 2 and all(_number(v) is not None for v in result.values)
    draw = _over_numbers if numeric else _by_label
    fig = draw(result, metric, seen, bound)
    over = f"{metric} for {result.variable} = {', '.join(result.values)}"
    return style.Picture.of(fig, f"{over}; points are centres over the rounds, bars 95 % intervals.")


def _number(name: str) -> float | None:
    try:
        x = float(name)
    except ValueError:
        return None
    return x if math.isfinite(x) else None


def _scale(seen, bound, unit: str) -> tuple[float, str]:
    mids = [e.mid for _, _, by_value in seen for e in by_value.values()] + ([bound[0]] if bound else [])
    return step_of(max(mids), unit)


def _whisker(e: Estimate, factor: float) -> list[list[float]]:
    if not math.isfinite(e.lo + e.hi):
        return [[0], [0]]
    return [[(e.mid - e.lo) / factor], [(e.hi - e.mid) / factor]]


def _top(e: Estimate) -> float:
    return e.hi if math.isfinite(e.hi) else e.mid


def _name(r: Result) -> str:
    return "this machine" if r.source == "here" else r.source


def _axis(metric: str, unit: str) -> str:
    words = metric.removesuffix("_s").removesuffix("_per").removesuffix("_bytes").replace("_", " ")
    return f"{words} ({unit})" if not metric.endswith("_per_s") else unit


def _wide(seen) -> bool:
    mids = [e.mid for _, _, by_value in seen for e in by_value.values() if e.mid > 0]
    return len(mids) > 1 and max(mids) / min(mids) > 20


def _over_numbers(result: Result, metric: str, seen, bound):
    fig, ax = style.figure()
    factor, unit = _scale(seen, bound, result[metric].unit if metric in result.metrics else "")
    for r, colour, by_value in seen:
        points = sorted((float(v), e) for v, e in by_value.items())
        xs, ys = [x for x, _ in points], [e.mid / factor for _, e in points]
        ax.plot(xs, ys, "o-", color=colour, markersize=4)
        for x, e in points:
            ax.errorbar([x], [e.mid / factor], _whisker(e, factor), color=colour, capsize=2, linewidth=1)
        ax.annotate(_name(r), (xs[-1], ys[-1]), (6, 0), textcoords="offset points", color=colour, va="center")
    xs = sorted(float(v) for v in result.values)
    if min(xs) > 0 and xs[-1] / xs[0] >= 8:
        ax.set_xscale("log", base=2)
    ax.set_xticks(xs, [digits(x) if x != int(x) else f"{int(x)}" for x in xs])
    ax.minorticks_off()
    if _wide(seen):
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if bound:
        ax.axhline(bound[0] / factor, color=style.BOUND, linestyle="--")
        ax.annotate(bound[1], (xs[0], bound[0] / factor), (0, 3), textcoords="offset points", color=style.BOUND)
    ax.set_xlabel(result.variable)
    ax.set_ylabel(_axis(metric, unit))
    ax.margins(x=0.14)
    return fig


def _by_label(result: Result, metric: str, seen, bound):
    names = list(dict.fromkeys(v for _, _, by_value in seen for v in by_value))
    fig, ax = style.figure(height=0.9 + 0.42 * len(names) * max(1, len(seen)) ** 0.7)
    factor, unit = _scale(seen, bound, seen[0][0][metric].unit)
    for k, (r, colour, by_value) in enumerate(seen):
        shift = (k - (len(seen) - 1) / 2) * 0.36
        for i, v in enumerate(names):
            if v not in by_value:
                continue
            e = by_value[v]
            ax.errorbar(
                [e.mid / factor], [i + shift], xerr=_whisker(e, factor), fmt="o", color=colour, capsize=3, markersize=6
            )
            text = f"{digits(e.mid / factor)} {unit}" + (f" ({_name(r)})" if i == 0 and len(seen) > 1 else "")
            ax.annotate(text, (e.mid / factor, i + shift), (0, 6), textcoords="offset points", color=colour, fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    if _wide(seen):
        ax.set_xscale("log")
        ax.margins(x=0.15)
    else:
        ax.set_xlim(0, max(_top(e) for _, _, by_value in seen for e in by_value.values()) / factor * 1.2)
    if bound:
        ax.axvline(bound[0] / factor, color=style.BOUND, linestyle="--")
        ax.annotate(
            bound[1], (bound[0] / factor, -0.5), (3, 0), textcoords="offset points", color=style.BOUND, fontsize=9
        )
    ax.set_xlabel(_axis(metric, unit))
    if not result.measured and result.source == "here":
        ax.set_title(f"not measured here; recorded on {seen[0][0].source}", color=style.RECORDED)
    elif result.source != "here":
        ax.set_title(f"recorded on {machine.named(result.machine).split(',')[0]}", color=style.RECORDED)
    return fig
