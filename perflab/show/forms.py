"""The forms that figures take: comparison, ladder, curve, parts, lanes, reveal. Plain data in, a Picture out.

Each says what is compared in its title and what is seen in its sentence. Values have `mid`, `lo` and `hi`, as an
Estimate has; where an interval is not finite none is drawn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.collections import LineCollection

from .canvas import (
    BASE,
    BODY,
    EDGE,
    GUESS,
    INK,
    LIMIT,
    MEANS,
    OTHER,
    SOFT,
    SUBJECT,
    TRACK,
    WIDTH,
    Canvas,
    fixed,
    inked,
    plain,
    spread,
    stacked,
    styled,
    ticks,
    times,
    upon,
    weight,
    width,
    wrapped,
)
from .style import Picture

PITCH = 0.36  # inches of a row


class Value(NamedTuple):
    """A figure with its interval."""

    mid: float
    lo: float = math.nan
    hi: float = math.nan


def _end(value) -> float:
    return value.hi if math.isfinite(value.hi) else value.mid


def _whisker(ax, value, y: float, colour: str = INK):
    if math.isfinite(value.lo + value.hi):
        ax.plot([value.lo, value.hi], [y, y], color=colour, linewidth=1, solid_capstyle="butt")


def _beside(ax, text: str, x: float, y: float, **how):
    """A text to the right of a point."""
    ax.annotate(text, (x, y), (how.pop("gap", 6), 0), textcoords="offset points", va="center", **how)


class Row(NamedTuple):
    """A bar: `text` stands at its end, `side` in a column at the right.

    bound: the best that this row can reach. other: the same on a recorded machine, thin and grey below.
    """

    name: str
    value: Value
    text: str
    side: str = ""
    bound: float | None = None
    other: Value | None = None
    other_text: str = ""
    group: str = ""
    colour: str = SUBJECT


@styled
def comparison(
    title: str,
    sentence: str,
    rows: Sequence[Row],
    *,
    note: str = "",
    side: str = "",
    ratio: bool = False,
    whole: float = 0.0,
    key: Mapping[str, str] | None = None,
) -> Picture:
    """Variants of one work as bars: from zero, or from 1 on a log axis where the values are ratios.

    side: the head of the column at the right. whole: a full bar, in grey behind each. key: what colours mean.
    """
    centres, headings, height = stacked([row.group for row in rows], [0.52 if row.other else PITCH for row in rows])
    canvas = Canvas(height, title, sentence, note, key, head=0.16 if side else 0.0)
    left = EDGE + max(width(row.name, BODY) for row in rows) + 0.12
    column = max(width(text, BODY, "bold") for text in (side, *(row.side for row in rows))) + 0.1 if side else 0.0
    for y, name in headings:
        canvas.put(EDGE, canvas.top + y, name, size=BODY, weight="bold")
    _bars(canvas, rows, centres, left, WIDTH - EDGE - column, ratio, whole)
    if side:
        canvas.put(WIDTH - EDGE, canvas.top - 0.07, side, color=SOFT, ha="right")
    for row, y in zip(rows if side else (), centres, strict=False):
        own = canvas.top + y - (0.09 if row.other else 0.0)
        canvas.put(WIDTH - EDGE, own, row.side, size=BODY, weight=weight(row.side), ha="right")
    return canvas.picture([f"{row.group}, {row.name}: {row.text}, {row.side}" for row in rows])


def _bars(canvas: Canvas, rows: Sequence[Row], centres, left: float, right: float, ratio=False, whole=0.0):
    """The bars of rows, their names, texts and bounds. A text that would lie on its bound stands behind it."""
    ax = canvas.axes(left, right, canvas.bottom - canvas.top)
    ax.spines["bottom"].set_visible(False)
    values = [x for row in rows for x in (row.value.mid, _end(row.value), row.bound or 0.0)]
    values += [row.other.mid for row in rows if row.other]
    text = max(max(width(row.text, BODY, "bold"), width(row.other_text)) for row in rows) + 0.2
    part = max(0.25, 1 - text / (right - left))  # of the axes, for the bars
    start = 1.0 if ratio else 0.0
    highest = max(*values, whole, start)
    if ratio:
        low = min(1.0, *(x for x in values if x > 0)) / 1.1
        ax.set(xscale="log", xlim=(low, low * (highest / low) ** (1 / part)))
    else:
        ax.set_xlim(0, highest / part)
    fixed(ax.xaxis, [])
    own = [y - (0.09 if row.other else 0.0) for row, y in zip(rows, centres, strict=True)]
    canvas.names([row.name for row in rows], own, left - 0.1)
    for k, (row, y) in enumerate(zip(rows, own, strict=True)):
        if whole:
            ax.barh(y, whole, height=0.22, color=TRACK)
        ax.barh(y, row.value.mid - start, left=start, height=0.22, color=row.colour)
        _whisker(ax, row.value, y)
        if row.bound:
            ax.plot([row.bound] * 2, [y - 0.14, y + 0.14], color=LIMIT, linewidth=2.2)
        end = max(_end(row.value), start)
        room = (width(row.text, BODY) + 0.15) / (right - left) * ax.get_xlim()[1]
        at = row.bound if row.bound and (ratio or end - room < row.bound < end + room) else end
        at = max(at, end)
        _beside(ax, row.text, at, y, fontsize=BODY, weight=weight(row.text))
        if row.other:
            ax.barh(centres[k] + 0.13, row.other.mid - start, left=start, height=0.1, color=OTHER)
            _beside(ax, row.other_text, row.other.mid, centres[k] + 0.14, color=SOFT)
        last = k + 1 == len(rows) or rows[k + 1].group != row.group
        ax.plot(
            [start] * 2, [centres[k] - 0.18, centres[k] + 0.18 if last else centres[k + 1]], color=SOFT, linewidth=1
        )
    return ax


class Rung(NamedTuple):
    """A change to the loop: its rate, the limit of its model alone, its gain in all as text, and the share busy."""

    name: str
    value: Value
    text: str
    limit: float
    gain: str
    share: float | None
    gained: bool = True


@styled
def ladder(title: str, sentence: str, rungs: Sequence[Rung], *, share: str, limit: str, note: str = "") -> Picture:
    """Successive changes to one loop: bars of its rate with a tick for each one's own limit, the gain, and a share.

    A change that gained nothing is light.
    """
    rows = [Row(r.name, r.value, r.text, bound=r.limit, colour=SUBJECT if r.gained else BASE) for r in rungs]
    centres = [PITCH * (k + 0.5) for k in range(len(rows))]
    canvas = Canvas(PITCH * len(rows), title, sentence, note, {limit: LIMIT}, head=0.2)
    wall = WIDTH - EDGE - 1.2
    left = EDGE + max(width(row.name, BODY) for row in rows) + 0.12
    right = wall - 0.25 - max(width(text, BODY, "bold") for text in ("in all", *(r.gain for r in rungs)))
    _bars(canvas, rows, centres, left, right)
    canvas.put(wall - 0.15, canvas.top - 0.07, "in all", color=SOFT, ha="right")
    canvas.put(WIDTH - EDGE, canvas.top - 0.07, share, color=SOFT, ha="right")
    canvas.names([r.gain for r in rungs], centres, wall - 0.15, weight="bold")
    side = canvas.axes(wall, WIDTH - EDGE, canvas.bottom - canvas.top)
    side.set_axis_off()
    side.set_xlim(0, 1)
    for rung, y in zip(rungs, centres, strict=True):
        if rung.share is None:
            continue
        side.barh(y, 1.0, height=0.22, color=TRACK)
        side.barh(y, rung.share, height=0.22, color=MEANS["GPU busy"])
        full = rung.share > 0.45
        inside = {"color": "white", "ha": "right"} if full else {"ha": "left"}
        side.text(rung.share + (-0.04 if full else 0.04), y, f"{rung.share:.0%}", va="center", **inside)
    shares = ["" if r.share is None else f", {share} {r.share:.0%}" for r in rungs]
    return canvas.picture([f"{r.name}: {r.text}, {r.gain}{s}" for r, s in zip(rungs, shares, strict=True)])


class Line(NamedTuple):
    """Points of a curve, (x, value) each. limit: a model or a bound, dashed and without points."""

    name: str
    points: Sequence[tuple[float, Value]]
    colour: str = SUBJECT
    limit: bool = False


@styled
def curve(
    title: str,
    sentence: str,
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    note: str = "",
    log_x: bool = False,
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    x_text: Callable[[float], str] = plain,
    y_text: Callable[[float], str] = plain,
) -> Picture:
    """A quantity over a number. Lines are named at their right ends; `marks` are places on x, dotted, with a text."""
    head = 0.26 if marks else 0.0
    canvas = Canvas(2.6, title, sentence, note, head=0.2 + head, foot=0.5)
    named = [line for line in lines if len(line.points) > 1]
    names = [wrapped(line.name, 1.7) for line in named]
    xs = sorted({x for line in lines for x, _ in line.points})
    mids = [value.mid for line in lines for _, value in line.points]
    low, high = (min(mids) / 1.3, max(mids) * 1.2) if log_y else (0.0, max(mids) * 1.08)
    heights = ticks(low, high, log_y)
    left = EDGE + max(0.3, *(width(y_text(y)) for y in heights)) + 0.1
    right = WIDTH - EDGE - max(width(text) for name in names for text in name) - 0.22
    ax = canvas.axes(left, right)
    pad = (xs[-1] / xs[0]) ** 0.03 if log_x else 0.03 * (xs[-1] - xs[0])
    limits = (xs[0] / pad, xs[-1]) if log_x else (xs[0] - pad, xs[-1])
    ax.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear", xlim=limits, ylim=(low, high))
    fixed(ax.yaxis, heights, map(y_text, heights))
    shown: list[float] = []
    for x in sorted({x for line in lines if not line.limit for x, _ in line.points}):
        room = width(x_text(x)) + 0.1
        if not shown or canvas.place(ax, x, high)[0] - canvas.place(ax, shown[-1], high)[0] > room:
            shown.append(x)
    fixed(ax.xaxis, shown, map(x_text, shown))
    ax.grid(axis="y")
    ax.set_xlabel(f"{x_name}, log scale" if log_x else x_name)
    canvas.put(EDGE, canvas.top - head - 0.12, f"{y_name}, log scale" if log_y else y_name, color=SOFT)
    for line in lines:
        at, values = [x for x, _ in line.points], [value for _, value in line.points]
        look = {"marker": "o", "markersize": 5, "linewidth": 2, "zorder": 3}
        if line.limit:
            look = {"linestyle": "--", "linewidth": 1.3, "zorder": 2}
        ax.plot(at, [value.mid for value in values], color=line.colour, clip_on=False, **look)
        for x, value in line.points:
            if math.isfinite(value.lo + value.hi):
                ax.vlines(x, value.lo, value.hi, color=line.colour, linewidth=1)
        if len(at) == 1:
            _beside(ax, line.name, at[0], values[0].mid, gap=7, color=inked(line.colour))
    wanted = [canvas.place(ax, x, high)[0] for x, _ in marks]
    places = spread(wanted, [width(text) + 0.1 for _, text in marks], left, right)
    for (x, text), at in zip(marks, places, strict=True):
        ax.axvline(x, color=SOFT, linewidth=1, linestyle=":")
        canvas.put(at, canvas.top - 0.12, text, color=SOFT, ha="center")
    ends = [canvas.place(ax, line.points[-1][0], line.points[-1][1].mid)[1] for line in named]
    beside = spread(ends, [0.17 * len(name) + 0.04 for name in names], canvas.top - 0.1, canvas.bottom + 0.1)
    for line, name, end, y in zip(named, names, ends, beside, strict=True):
        canvas.line((right + 0.05, right + 0.15), (end, y), line.colour)
        canvas.put(right + 0.19, y, "\n".join(name), color=inked(line.colour), linespacing=1.15)

    def heard(line: Line) -> str:
        return ", ".join(f"{y_text(float(f'{value.mid:.3g}'))} at {x_text(x)}" for x, value in line.points)

    return canvas.picture([f"{y_name} over {x_name}", *(f"{line.name}: {heard(line)}" for line in lines)])


@styled
def parts(
    title: str,
    sentence: str,
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str] = MEANS,
    *,
    note: str = "",
    text: Callable[[float], str] = "{:.0%}".format,
    totals: Mapping[str, str] | None = None,
    least: float = 0.03,
) -> Picture:
    """Bars of a whole. Without `totals`, shares of 1: parts of at least `least` with no room for their number are
    named behind the bar. With totals, amounts, and the total stands there."""
    pitch, kinds = 0.44, {part: colours[part] for row in rows.values() for part in row}
    canvas = Canvas(pitch * len(rows), title, sentence, note, kinds)
    left = EDGE + (max(width(name, BODY) for name in rows) + 0.12 if any(rows) else 0)
    whole = max(sum(row.values()) for row in rows.values())
    behind, room = dict(totals or {}), WIDTH - EDGE - left

    def fits(amount: float) -> bool:
        return width(text(amount)) + 0.08 <= amount / whole * room

    if totals:
        lengths = {name: sum(row.values()) / whole for name, row in rows.items()}
        room = min((room - width(behind[n], BODY) - 0.12) / share for n, share in lengths.items() if share > 0.2)
    for _ in range(0 if totals else 2):  # what stands behind takes room from the bar
        for name, row in rows.items():
            behind[name] = ", ".join(f"{part} {text(x)}" for part, x in row.items() if x >= least and not fits(x))
        room = WIDTH - EDGE - left - max(width(t) for t in behind.values()) - 0.12
    ax = canvas.axes(left, WIDTH - EDGE, len(rows))
    ax.set_xlim(0, whole * (WIDTH - EDGE - left) / room)
    ax.set_axis_off()
    canvas.names(list(rows), [pitch * (k + 0.5) for k in range(len(rows))], left - 0.1)
    for k, (name, row) in enumerate(rows.items()):
        at = 0.0
        for part, amount in row.items():
            ax.barh(k + 0.5, amount, left=at, height=0.62, color=kinds[part], edgecolor="white", linewidth=0.8)
            if fits(amount) and part != "idle":
                ax.text(at + amount / 2, k + 0.5, text(amount), color=upon(kinds[part]), ha="center", va="center")
            at += amount
        if behind[name]:
            _beside(ax, behind[name], at, k + 0.5, fontsize=BODY if totals else 9)
    inside = {name: ", ".join(f"{part} {text(x)}" for part, x in row.items() if x) for name, row in rows.items()}
    return canvas.picture([f"{name}: {line}, {(totals or {}).get(name, '')}" for name, line in inside.items()])


class Lane(NamedTuple):
    """A row of spans, (start, end, kind) each. texts: (start, end, what stands there if there is room).

    end: when the lane is done, and what is said there.
    """

    name: str
    spans: Sequence[tuple[float, float, str]]
    group: str = ""
    texts: Sequence[tuple[float, float, str]] = ()
    end: tuple[float, str] | None = None


@styled
def lanes(
    title: str,
    sentence: str,
    rows: Sequence[Lane],
    until: float,
    colours: Mapping[str, str] = MEANS,
    *,
    unit: str = "ms",
    note: str = "",
    launches: Sequence[tuple[float, int, float, int]] = (),
) -> Picture:
    """Who does what when. launches: time and lane of a cause, time and lane of its effect, joined by a line."""
    centres, headings, height = stacked([row.group for row in rows], [PITCH] * len(rows))
    kinds = {kind: colour for kind, colour in colours.items() if any(kind == k for row in rows for *_, k in row.spans)}
    canvas = Canvas(height + 0.06, title, sentence, note, kinds, foot=0.48)
    left, right = EDGE + max(width(row.name, BODY) for row in rows) + 0.12, WIDTH - EDGE - 0.12
    ax = canvas.axes(left, right, height + 0.06)
    ax.set_xlim(0, until)
    shown = ticks(0, until, False, right - left)
    fixed(ax.xaxis, shown, map(plain, shown))
    ax.grid(axis="x")
    ax.set_xlabel(unit)
    for y, name in headings:
        canvas.put(EDGE, canvas.top + y, name, size=BODY, weight="bold")
    canvas.names([row.name for row in rows], centres, left - 0.1)
    inch = until / (right - left)
    for row, y in zip(rows, centres, strict=True):
        for kind, colour in kinds.items():
            bars = [(a, b - a) for a, b, k in row.spans if k == kind and a < until and b > 0]
            edges = [0.6 if length > 0.03 * inch else 0.0 for _, length in bars]  # an edge would hide a thin one
            ax.broken_barh(bars, (y - 0.14, 0.28), facecolors=colour, edgecolors="white", linewidths=edges)
        for start, end, text in row.texts:
            a, b = max(start, 0), min(end, until)
            under = next((kinds[k] for s, e, k in row.spans if s <= (a + b) / 2 <= e), "white")
            if width(text) + 0.06 <= (b - a) / inch:
                ax.text((a + b) / 2, y, text, color=upon(under), ha="center", va="center")
        if row.end:
            _beside(ax, row.end[1], row.end[0], y, fontsize=BODY, weight="bold")
    joined = [[(a, centres[i] + 0.14), (b, centres[j] - 0.14)] for a, i, b, j in launches]
    ax.add_collection(LineCollection(joined, colors=SOFT, linewidths=0.8), autolim=False)
    heard = [f"{row.group}, {row.name}: {', '.join(dict.fromkeys(k for *_, k in row.spans))}" for row in rows]
    return canvas.picture([f"Time lines over {until:g} {unit}", *heard])


@styled
def reveal(
    question: str,
    sentence: str,
    guess: float,
    measured: Value,
    *,
    bound: float | None = None,
    text: Callable[[float], str] = times,
    log: bool = False,
    note: str = "",
) -> Picture:
    """A guess, a bound where there is one, and a measurement on one axis, a row each."""
    rows = [("your guess", Value(guess), GUESS, "D")]
    if bound:
        rows.append(("bound", Value(bound), LIMIT, "|"))
    rows.append(("measured", measured, SUBJECT, "o"))
    centres = [PITCH * (k + 0.5) for k in range(len(rows))]
    canvas = Canvas(PITCH * len(rows), question, sentence, note, foot=0.3)
    left = EDGE + max(width(name, BODY) for name, *_ in rows) + 0.2
    part = 1 - (max(width(text(value.mid), BODY, "bold") for _, value, *_ in rows) + 0.2) / (WIDTH - EDGE - left)
    ax = canvas.axes(left, WIDTH - EDGE, canvas.bottom - canvas.top)
    ends = [x for _, value, *_ in rows for x in (value.mid, value.lo, value.hi) if math.isfinite(x)]
    low, high = (min(ends) / 1.5, max(ends)) if log else (min(0.0, *ends), max(ends))
    high = low * (high / low) ** (1 / part) if log else low + ((high - low) or 1) / part
    ax.set(xscale="log" if log else "linear", xlim=(low, high))
    shown = ticks(low, high, log, WIDTH - EDGE - left)
    fixed(ax.xaxis, shown, map(plain, shown))
    ax.grid(axis="x")
    for (name, value, colour, mark), y in zip(rows, centres, strict=True):
        canvas.names([name], [y], left - 0.14, color=inked(colour))
        if colour == LIMIT:
            ax.axvline(value.mid, color=LIMIT, linewidth=1.2, linestyle="--")
        _whisker(ax, value, y, colour)
        ax.plot([value.mid], [y], mark, color=colour, markersize=8, markeredgewidth=2 if mark == "|" else 1)
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        _beside(ax, text(value.mid), _end(value), y, gap=9, fontsize=BODY, weight="bold", bbox=plate)
    return canvas.picture([f"{name}: {text(value.mid)}" for name, value, *_ in rows])
