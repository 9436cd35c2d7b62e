"""The roofline: which of three limits holds for an operator on a device, its picture, and the explorer.

`place` evaluates a model (Williams, Waterman and Patterson 2009, DOI 10.1145/1498765.1498785) and adds a
third limit to it: starting a call. A call takes at least as long as the slowest of the three.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from perflab.bench.units import digits, on_axis, quantity
from perflab.errors import PerflabError
from perflab.show import style
from perflab.show.explorer import Explorer

from .gpus import FORMATS, Gpu, Roofs, known
from .operators import OPERATORS, OperatorCall
from .work import Work

ARITHMETIC, BANDWIDTH, OVERHEAD = "arithmetic", "bandwidth", "overhead"


@dataclass(frozen=True)
class Placed:
    """Where the model puts one call: `needs_s` are the seconds that its FLOPs, its bytes and its start need by
    themselves, by regime. The longest of them is its regime, and the least time that it can take, `bound_s`.

    `cached`: all that it touches fits the device's last cache, so that repeated calls may beat the roof of
    the copy, which was measured from memory.
    """

    needs_s: Mapping[str, float]
    intensity: float
    ridge: float
    cached: bool

    @property
    def regime(self) -> str:
        return max(self.needs_s, key=self.needs_s.get)

    @property
    def bound_s(self) -> float:
        return self.needs_s[self.regime]


def place(work: Work, roofs: Roofs, dtype: str, overhead_s: float = 0.0) -> Placed:
    """Which limit holds for `work` (FLOPs and bytes) under the copy's roof and the arithmetic roof of `dtype`.

    overhead_s: what starting the call takes, however small it is. Raises PerflabError where the device has
    no roof for `dtype`.
    """
    if dtype not in roofs.peaks:
        raise PerflabError(f"{roofs.name} has no roof for {dtype}: it has {', '.join(roofs.peaks) or 'none'}.")
    needs_s = {
        ARITHMETIC: work.flops / roofs.peaks[dtype],
        BANDWIDTH: work.moved_bytes / roofs.bytes_per_s,
        OVERHEAD: overhead_s,
    }
    fits = roofs.cache_bytes is not None and work.moved_bytes <= roofs.cache_bytes
    return Placed(needs_s, work.intensity, roofs.ridge(dtype), fits)


def across(calls: Mapping[str, OperatorCall]):
    """The same calls on other roofs, as printed: a pandas DataFrame with a row a card.

    calls: by name. An empty cell: no such figure is printed.
    """
    import pandas as pd

    rows = {}
    for name, card in known().items():
        rows[name] = {"bytes/s": quantity(card.bytes_per_s, "bytes/s")}
        for title, call in calls.items():
            placed = place(call.work, card, call.roof) if call.roof in card.peaks else None
            rows[name][f"ridge, {call.roof}"] = digits(placed.ridge) if placed else ""
            rows[name][title] = f"{placed.regime}, {quantity(placed.bound_s, 's')}" if placed else ""
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("card")


# -- the picture


@dataclass(frozen=True)
class Reached:
    """A point of the picture: an operator's FLOP per byte moved, and the FLOP/s that it reached."""

    name: str
    intensity: float
    flops_per_s: float


LEFT, RIGHT = 0.03, 3e4  # FLOP per byte


@style.styled
def picture(
    here: Roofs, points: Sequence[Reached] = (), printed: Gpu | None = None, beside: Sequence[Roofs] = ()
) -> style.Picture:
    """Measured roofs solid, printed ones dashed, other machines grey by name; operators as named points.

    points: of one operator from its smallest to its largest size.
    """
    if not here.peaks:
        raise PerflabError(f"{here.name} has no arithmetic roof, and without one there is no roofline to draw.")
    fig, ax = style.figure(height=4.6)
    beside = [other for other in beside if "fp32" in other.peaks]
    own = style.HERE if here.measured_here else style.RECORDED
    for other in beside:
        _roof(ax, other, ["fp32"], style.RECORDED)
        _name(ax, f"{other.name}, fp32", other.peaks["fp32"], (-2, 3), style.RECORDED, ha="right")
    if printed and (kinds := [k for k in printed.peaks if k in here.peaks]):
        _roof(ax, printed, kinds, style.BOUND, "--")
        _name(ax, "printed", max(printed.peaks[k] for k in kinds), (-2, 3), style.BOUND, ha="right")
    _roof(ax, here, here.peaks, own)
    _name_levels(ax, here, own)
    _axes(ax, [here, *beside, *([printed] if printed else [])], points)
    _operators(ax, points)
    ax.set_title("roofs measured here" if here.measured_here else f"recorded on {here.name}", color=own)
    drawn = ", ".join(dict.fromkeys(p.name for p in points))
    return style.Picture.of(
        fig,
        "a roofline: FLOP/s over FLOP per byte, the copy's slope and a flat line a format; measured roofs solid, "
        f"printed ones dashed, other machines grey{f'; points of {drawn}, larger for larger sizes' if drawn else ''}.",
    )


def _roof(ax, roofs: Roofs, kinds: Sequence[str], colour: str, dashed: str = "-") -> None:
    """The slope of the copy and a flat line a format."""
    top = max(roofs.peaks[k] for k in kinds)
    ax.plot([LEFT, top / roofs.bytes_per_s], [LEFT * roofs.bytes_per_s, top], color=colour, linestyle=dashed)
    for kind in kinds:
        peak = roofs.peaks[kind]
        ax.plot([roofs.ridge(kind), RIGHT], [peak, peak], color=colour, linestyle=dashed, linewidth=1.2)


def _name(ax, text: str, height: float, offset: tuple[int, int], colour: str, **align: str):
    """Text at the right end of a roof."""
    where = {"textcoords": "offset points", "annotation_clip": False, "color": colour, "fontsize": 9}
    ax.annotate(text, (RIGHT, height), offset, **where, **align)


def _name_levels(ax, roofs: Roofs, colour: str):
    """The names of the formats; those within a factor of 1.5 share a line, as their names would overlap."""
    levels: list[list[str]] = []
    for kind in sorted(roofs.peaks, key=roofs.peaks.get):
        if not levels or roofs.peaks[kind] >= 1.5 * roofs.peaks[levels[-1][0]]:
            levels.append([])
        levels[-1].append(kind)
    for level in levels:
        _name(ax, ", ".join(level), roofs.peaks[level[-1]], (4, 0), colour, va="center")


def _axes(ax, roofs: Sequence[Roofs], points: Sequence[Reached]):
    top = max(max(r.peaks.values()) for r in roofs)
    low = min([LEFT * min(r.bytes_per_s for r in roofs), *(p.flops_per_s for p in points)])
    ax.set(xscale="log", yscale="log", xlim=(LEFT, RIGHT), ylim=(low / 3, top * 5))
    ax.set(xlabel="FLOP per byte moved", ylabel="FLOP/s")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    ax.yaxis.set_major_formatter(lambda y, _: on_axis(y))
    ax.minorticks_off()


def _operators(ax, points: Sequence[Reached]):
    """Points joined by operator; names stacked in the empty corner below the roofs, with a line to each."""
    colours = dict(zip(OPERATORS, style.PARTS, strict=False))
    lines = [[p for p in points if p.name == name] for name in dict.fromkeys(p.name for p in points)]
    low, high = (math.log10(y) for y in ax.get_ylim())
    for k, line in enumerate(sorted(lines, key=lambda line: line[0].flops_per_s)):
        xs, ys, colour = [p.intensity for p in line], [p.flops_per_s for p in line], colours[line[0].name]
        ax.plot(xs, ys, color=colour, linewidth=0.8, zorder=3)
        for size, x, y in zip((4, 6, 8), xs, ys, strict=False):
            ax.plot([x], [y], "o", color=colour, markersize=size, zorder=4)
        at = (400, 10 ** (low + (high - low) * (0.06 + 0.075 * k)))
        thread = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3}
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.annotate(line[0].name, (xs[0], ys[0]), at, fontsize=9, va="center", arrowprops=thread, bbox=plate)


# -- the explorer


def explore_roofline(here: Roofs | None = None, overhead_s: float = 5e-6) -> Explorer:
    """Device, format, operator and size; the point under the roof, and which limit the model names.

    here: the measured roofs of this machine, offered beside the printed ones of data/gpus.toml. overhead_s:
    what starting a call takes, taken to be the same on all of them.
    """
    devices: dict[str, Roofs] = ({"this machine": here} if here else {}) | known()

    def draw(ax, device: str, dtype: str, operator: str, n: int) -> str:
        roofs = devices[device]
        call = OperatorCall(operator, n, n, dtype, n if operator == "matmul" else 0)
        source = "printed" if roofs is not here else "measured" if here.measured_here else "recorded"
        ax.figure.subplots_adjust(left=0.1, right=0.89)
        if call.roof not in roofs.peaks:
            ax.set_axis_off()
            return f"No {call.roof} roof is {source} for {device}: it has {', '.join(roofs.peaks)}."
        placed = place(call.work, roofs, call.roof, overhead_s)
        point = Reached(operator, placed.intensity, call.work.flops / placed.bound_s)
        _roof(ax, roofs, roofs.peaks, "#a0a0a0")
        _name_levels(ax, roofs, "#a0a0a0")
        _roof(ax, roofs, [call.roof], style.BOUND, "--" if source == "printed" else "-")
        _axes(ax, [roofs], [point])
        ax.plot([point.intensity], [point.flops_per_s], "o", color=style.HERE, markersize=9, zorder=4)
        ax.axvline(placed.ridge, color="#a0a0a0", linewidth=0.8)
        ax.set_title(f"{operator}, {n} x {n}, {dtype}: {placed.regime}, at least {quantity(placed.bound_s, 's')}")
        limits = {ARITHMETIC: f"its FLOPs at the {call.roof} roof", BANDWIDTH: "its bytes at the roof of a copy"}
        fits = " All of it fits the last cache, so that repeated calls may beat the copy's roof."
        return (
            f"{quantity(call.work.flops, 'flops')} and {quantity(call.work.moved_bytes, 'bytes')}: "
            f"{digits(placed.intensity)} FLOP per byte, beside a ridge of {digits(placed.ridge)}. "
            f"What limits it is {limits.get(placed.regime, 'starting it')}.{fits if placed.cached else ''} "
            f"A model over {source} roofs, with {quantity(overhead_s, 's')} to start a call: nothing is timed here."
        )

    sizes = [2**k for k in range(4, 15)]
    return Explorer(
        draw,
        "a modelled point under the roofline of a device, for an operator, a format and a size.",
        size=(8.0, 4.2),
        device=widgets.Dropdown(options=list(devices), description="device"),
        dtype=widgets.Dropdown(value="bf16", options=list(FORMATS), description="format"),
        operator=widgets.Dropdown(value="gelu", options=list(OPERATORS), description="operator"),
        n=widgets.SelectionSlider(value=2048, options=sizes, description="n"),
    )
