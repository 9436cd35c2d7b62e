"""A recorded trace on a time line: the host's phases and calls, the device, its gaps by cause. Nothing is measured."""

import functools
import re
from collections import Counter
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

LANES = ("host", "calls", "device", "idle")
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


class TraceView:
    """What is drawn of a trace, in seconds from the device's first event.

    bars: lane, colour, and a row of start and end for each bar. phases: name, start and end.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        notes, events, names = trace.recording.notes, trace.events, trace.recording.names
        is_torchs = trace.recording.matching(r"^(ProfilerStep#|Optimizer\.|$)", notes)  # inside the user's own phases
        phases = notes[(notes.thread == trace.places.main) & ~is_torchs]
        labels = [re.sub(r"^enumerate\(DataLoader\).*", "DataLoader", names[i]) for i in phases.name]
        self.phases = [(label, *times) for label, times in zip(labels, self._seconds(phases).tolist(), strict=True)]
        self.bars = [
            ("host", "#d9d9d9", self._seconds(phases)),
            ("calls", style.RECORDED, self._seconds(trace.recording.calls)),
            ("device", style.HERE, self._seconds(events[events.kind == KERNEL])),
            ("device", style.PARTS[2], self._seconds(events[events.kind != KERNEL])),
        ]
        for cause, colour in COLOURS.items():
            times = [(gap.start_s, gap.end_s) for gap in trace.gaps if gap.cause == cause]
            self.bars.append(("idle", colour, np.array(times).reshape(-1, 2)))
        edges = [time for step in trace.steps for time in (step.start_s, step.end_s)]
        self.begin, self.end = min([0.0, *edges]), max([trace.span_s, *edges])

    def _seconds(self, spans: np.recarray) -> np.ndarray:
        return (np.column_stack([spans.start, spans.end]) - self.trace.origin) / 1e9

    def busy_share(self, low: float, high: float) -> float:
        """Share of the window in which a kernel or a copy runs."""
        window = self.trace.origin + np.rint(np.array([[low], [high]]) * 1e9).astype(np.int64)
        return float(covered(self.trace.busy, *window)[0] / (1e9 * (high - low)))

    def idle(self, low: float, high: float) -> dict[str, float]:
        """Share of the window by cause, the largest first."""
        shares: Counter[str] = Counter()
        for gap in self.gaps(low, high):
            shares[gap.cause] += (min(gap.end_s, high) - max(gap.start_s, low)) / (high - low)
        return dict(shares.most_common())

    def gaps(self, low: float, high: float) -> list[gaps.Gap]:
        """Those that reach into the window."""
        return [gap for gap in self.trace.gaps if gap.end_s > low and gap.start_s < high]


def explore_trace(traces: Mapping[str, Trace]) -> Explorer:
    """A window that moves over recorded traces. Sliders: where it begins, in steps of the recording, and its width.

    Raises PerflabError where there is no trace to show.
    """
    if not traces:
        raise PerflabError("explore_trace needs at least one trace by name: read some of data/traces first.")
    view_of = functools.cache(lambda name: TraceView(traces[name]))

    def draw(ax, name: str, begin: float, width_us: float) -> str:
        view = view_of(name)
        low = view.begin + begin * (view.end - view.begin)
        high = low + width_us / 1e6
        _draw_bars(ax, view, low, high)
        ax.set_yticks(range(len(LANES)), LANES)
        ax.set_ylim(len(LANES) - 0.4, -0.6)
        ax.set_xlim(0, width_us)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("us", loc="left")  # the key stands to the right of it
        ax.set_title(f"{name}, recorded on {view.trace.name}: {1e3 * low:,.2f} ms after the device began")
        causes = {cause: COLOURS[cause] for cause in view.idle(low, high)}
        style.key(ax, {"kernel": style.HERE, "copy": style.PARTS[2]} | causes)
        return _caption(view, low, high)

    return Explorer(
        draw,
        "a recorded time line: the host's phases and CUDA calls, kernels and copies, gaps coloured by cause.",
        size=(8.0, 3.6),
        name=widgets.Dropdown(options=list(traces), description="trace"),
        begin=widgets.FloatSlider(0.5, min=0, max=1, step=0.005, description="from", readout_format=".3f"),
        width_us=widgets.FloatLogSlider(2000, base=10, min=1.5, max=5, step=0.05, description="us in view"),
    )


def _draw_bars(ax, view: TraceView, low: float, high: float):
    for lane, colour, spans in view.bars:
        shown = spans[(spans[:, 1] > low) & (spans[:, 0] < high)]
        bars = 1e6 * np.column_stack([shown[:, 0] - low, shown[:, 1] - shown[:, 0]])
        edge = "white" if lane == "host" else None
        ax.broken_barh(bars, (LANES.index(lane) - 0.35, 0.7), facecolors=colour, edgecolor=edge)
    for label, *times in view.phases:
        start, end = np.clip(times, low, high)
        if end - start > LABELLED * (high - low):
            ax.text(5e5 * (start + end - 2 * low), 0, label, ha="center", va="center", fontsize=8, clip_on=True)


def _caption(view: TraceView, low: float, high: float) -> str:
    busy = f"In view the device is busy {view.busy_share(low, high):.0%} of the time."
    idle = ", ".join(f"{cause} {share:.0%}" for cause, share in view.idle(low, high).items() if share >= 0.005)
    if not idle:
        return busy
    longest = max(view.gaps(low, high), key=lambda gap: gap.length_s)
    length = quantity(longest.length_s, "s")
    return f"{busy} Idle: {idle}. The longest gap in view: {length}, {longest.cause}, {longest.place}."
