"""A recorded trace on a time line: the host's phases and calls, the device, its gaps by cause. Nothing is measured."""

from collections.abc import Mapping

import ipywidgets as widgets
import numpy as np

from perflab.bench.intervals import covered
from perflab.bench.units import quantity
from perflab.errors import PerflabError
from perflab.show import style
from perflab.show.explorer import Explorer

from . import gaps
from .trace import KERNEL, Trace

ROWS = ("host", "calls", "device", "idle")
COLOURS = {
    gaps.HOST: style.PARTS[1],
    gaps.SYNC: style.BOUND,
    gaps.DATA: style.PARTS[3],
    gaps.COPY: style.PARTS[4],
    gaps.ALLOCATE: style.PARTS[5],
    gaps.QUEUED: "#bdbdbd",
    gaps.UNKNOWN: "#e0e0e0",
}
LABELLED = 0.08  # of the width: a narrower bar has no room for its name


class Strip:
    """The parts of a trace that are drawn, in seconds from the device's first event."""

    def __init__(self, trace: Trace):
        self.trace = trace
        recording, main = trace.recording, trace.places.main
        notes, calls, events = recording.notes, recording.calls, trace.events
        own = (notes.thread == main) & ~recording.matching("^ProfilerStep#", notes)
        named = {i: _phase(recording.names[notes.name[i]]) for i in np.flatnonzero(own).tolist()}
        self.phases = [(*self._seconds(notes, i), name) for i, name in named.items() if name]
        self.calls = self._spans(calls, np.ones(len(calls), bool))
        self.kernels = self._spans(events, events.kind == KERNEL)
        self.copies = self._spans(events, events.kind != KERNEL)
        self.gaps = [(g.start_s, g.end_s, g.cause) for g in trace.gaps]
        self.begin = min(0.0, min((s.start_s for s in trace.steps), default=0.0))
        self.end = max(trace.span_s, max((s.end_s for s in trace.steps), default=0.0))

    def _seconds(self, spans, i: int) -> tuple[float, float]:
        origin = self.trace.origin
        return (int(spans.start[i]) - origin) / 1e9, (int(spans.end[i]) - origin) / 1e9

    def _spans(self, spans, chosen: np.ndarray) -> np.ndarray:
        origin = self.trace.origin
        return np.stack([spans.start[chosen] - origin, spans.end[chosen] - origin], axis=1) / 1e9

    def busy_share(self, low: float, high: float) -> float:
        """Share of the window in which a kernel or a copy runs."""
        window = self.trace.origin + np.rint(np.array([[low], [high]]) * 1e9).astype(np.int64)
        return float(covered(self.trace.busy, *window)[0] / (1e9 * (high - low)))


def _phase(name: str) -> str:
    """An annotation as it is written on its bar; empty for torch's own around an optimizer's step, which is a phase."""
    return "" if name.startswith("Optimizer.") else "DataLoader" if name.startswith("enumerate(DataLoader)") else name


def explore_trace(traces: Mapping[str, Trace]) -> Explorer:
    """A window that moves over recorded traces. Sliders: where it begins, in steps of the recording, and its width.

    Raises PerflabError where there is no trace to show.
    """
    if not traces:
        raise PerflabError("explore_trace needs at least one trace by name: read some of data/traces first.")
    strips: dict[str, Strip] = {}

    def draw(ax, name: str, begin: float, width_us: float) -> str:
        strip = strips.setdefault(name, Strip(traces[name]))
        low = strip.begin + begin * (strip.end - strip.begin)
        high = low + width_us / 1e6
        _bars(ax, strip, low, high)
        ax.set_yticks(range(len(ROWS)), ROWS)
        ax.set_ylim(len(ROWS) - 0.4, -0.6)
        ax.set_xlim(0, width_us)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("us", loc="left")  # the key stands to the right of it
        ax.set_title(f"{name}, recorded on {strip.trace.name}: {1e3 * low:,.2f} ms after the device began")
        seen = [(a, b, cause) for a, b, cause in strip.gaps if b > low and a < high]
        style.key(
            ax, {"kernel": style.HERE, "copy": style.PARTS[2]} | {c: COLOURS[c] for c in _causes(seen, low, high)}
        )
        return _caption(strip, seen, low, high)

    return Explorer(
        draw,
        "a recorded time line: the host's phases and CUDA calls, kernels and copies, gaps coloured by cause.",
        size=(8.0, 3.6),
        name=widgets.Dropdown(options=list(traces), description="trace"),
        begin=widgets.FloatSlider(0.5, min=0, max=1, step=0.005, description="from", readout_format=".3f"),
        width_us=widgets.FloatLogSlider(2000, base=10, min=1.5, max=5, step=0.05, description="us in view"),
    )


def _bars(ax, strip: Strip, low: float, high: float):
    def bars(row: str, spans, colour: str, **how):
        spans = np.asarray(spans).reshape(-1, 2)
        seen = spans[(spans[:, 1] > low) & (spans[:, 0] < high)]
        drawn = [(1e6 * (a - low), 1e6 * (b - a)) for a, b in seen.tolist()]
        ax.broken_barh(drawn, (ROWS.index(row) - 0.35, 0.7), facecolors=colour, **how)

    bars("host", [(a, b) for a, b, _ in strip.phases], "#d9d9d9", edgecolor="white")
    for start, end, name in strip.phases:
        a, b = max(start, low), min(end, high)
        if b - a > LABELLED * (high - low):
            ax.text(5e5 * (a + b - 2 * low), 0, name, ha="center", va="center", fontsize=8, clip_on=True)
    bars("calls", strip.calls, style.RECORDED)
    bars("device", strip.kernels, style.HERE)
    bars("device", strip.copies, style.PARTS[2])
    for cause, colour in COLOURS.items():
        bars("idle", [(a, b) for a, b, c in strip.gaps if c == cause], colour)


def _causes(seen, low: float, high: float) -> dict[str, float]:
    """Share of the window by cause, the largest first."""
    sums: dict[str, float] = {}
    for a, b, cause in seen:
        sums[cause] = sums.get(cause, 0.0) + min(b, high) - max(a, low)
    return {cause: s / (high - low) for cause, s in sorted(sums.items(), key=lambda item: -item[1])}


def _caption(strip: Strip, seen, low: float, high: float) -> str:
    causes = _causes(seen, low, high)
    said = f"In view the device is busy {strip.busy_share(low, high):.0%} of the time."
    idle = ", ".join(f"{cause} {share:.0%}" for cause, share in causes.items() if share >= 0.005)
    if not idle:
        return said
    a, b, cause = max(seen, key=lambda gap: gap[1] - gap[0])
    place = next((g.place for g in strip.trace.gaps if g.start_s == a and g.cause == cause), "")
    return f"{said} Idle: {idle}. The longest gap in view: {quantity(b - a, 's')}, {cause}, {place}."
