"""Stretches of time as bars, a row a lane: what a worker, a stream or a host does when."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """One stretch of time in seconds, of one lane and one kind; a batch's number where it is drawn."""

    lane: str
    kind: str
    start: float
    end: float
    number: int | None = None


def draw(
    ax,
    spans: Sequence[Span],
    lanes: Sequence[str],
    colours: Mapping[str, str],
    label: str,
    until_s: float = 0,
    per_s: float = 1e3,
):
    """Fill `ax` with the spans, coloured by kind; up to `until_s` where that is given.

    per_s: units of the axis in a second, 1e3 for milliseconds.
    """
    for y, lane in enumerate(lanes):
        mine = [s for s in spans if s.lane == lane and not (until_s and s.start >= until_s)]
        bars = [(per_s * s.start, per_s * (s.end - s.start)) for s in mine]
        ax.broken_barh(bars, (y - 0.35, 0.7), facecolors=[colours[s.kind] for s in mine], edgecolor="white")
        for s in mine:
            if s.number is not None:
                ink = "white" if lane == "compute" else "black"
                ax.text(
                    per_s * (s.start + s.end) / 2, y, str(s.number), color=ink, ha="center", va="center", fontsize=8
                )
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_xlabel(label, loc="left")
    ax.grid(axis="y", visible=False)
    if until_s:
        ax.set_xlim(0, per_s * until_s)
