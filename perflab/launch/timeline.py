"""The host that launches and the device that computes, on one time line. A model, not a measurement."""

from collections.abc import Mapping
from dataclasses import dataclass

import ipywidgets as widgets

from perflab.bench import machine
from perflab.bench.result import Result
from perflab.bench.units import digits, quantity
from perflab.show import lanes, style
from perflab.show.explorer import Explorer
from perflab.show.lanes import Span

SHOWN = 10  # operators on the drawn time line
COLOURS = {"launch": style.PARTS[1], "host waits": style.PARTS[4], "kernel": style.HERE}


@dataclass(frozen=True)
class Timeline:
    """The spans of a row of operators on the lanes "host" and "device", and its steady state."""

    spans: list[Span]
    kernel_s: float
    period_s: float  # from one operator to the next, once the row runs steadily

    @property
    def span_s(self) -> float:
        """From the first launch to the end of the last kernel."""
        return max(span.end for span in self.spans)

    @property
    def busy_share(self) -> float:
        """The share of a period in which the device computes; the two ends of the row are left out."""
        return self.kernel_s / self.period_s

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_share


def predicted(ops: int, kernel_s: float, launch_s: float, synchronous: bool = False) -> Timeline:
    """The time line of `ops` operators whose kernels take `kernel_s` and whose launches take the host `launch_s`.

    A kernel begins when it is launched and the one before it is done. Asynchronous, the host launches on
    meanwhile: a period is the longer of the two. Synchronous, it waits for each kernel: a period is the sum.
    """
    spans, free, done = [], 0.0, 0.0
    for _ in range(ops):
        launched = free + launch_s
        spans.append(Span("host", "launch", free, launched))
        start = max(launched, done)
        done = start + kernel_s
        spans.append(Span("device", "kernel", start, done))
        if synchronous:
            spans.append(Span("host", "host waits", launched, done))
        free = done if synchronous else launched
    return Timeline(spans, kernel_s, kernel_s + launch_s if synchronous else max(kernel_s, launch_s))


def rows(ops: int, kernel_s: float, launch_s: float) -> dict[str, dict[str, float]]:
    """The same operators asynchronous and synchronous, as rows for `observe`: span and idle share."""
    both = {"asynchronous": False, "synchronous": True}
    lines = {name: predicted(ops, kernel_s, launch_s, waits) for name, waits in both.items()}
    return {name: {"span_s": t.span_s, "idle_percent": round(100 * t.idle_share, 1)} for name, t in lines.items()}


@dataclass(frozen=True)
class Point:
    """A measured setting beside the model: seconds of a kernel and of a launch, the device's busy share, where."""

    kernel_s: float
    launch_s: float
    busy_share: float
    where: str

    @classmethod
    def of(cls, busy: Result, value, kernel_s: float, launch_s: float) -> "Point":
        """From a Result with `busy_s` and `wall_s`, at one of its values."""
        share = busy["busy_s"].over(busy["wall_s"], value).mid
        where = "here" if busy.source == "here" else f"on {busy.source} ({machine.named(busy.machine)})"
        return cls(kernel_s, launch_s, share, where)


def explore_launch(points: Mapping[str, Point] | None = None) -> Explorer:
    """Sliders for the operators, their kernels and launches; the time line of host and device that they make.

    `points` are measured settings by name: choosing one sets the sliders to it and says what was measured.
    Those without a figure (nan) are chosen as well, and say that nothing was measured.
    """
    points = dict(points or {})

    def draw(ax, ops: int, kernel_us: float, launch_us: float, synchronous: bool, measured: str) -> str:
        times_s = 1e-6 * kernel_us, 1e-6 * launch_us
        line = predicted(ops, *times_s, synchronous)
        first = predicted(min(ops, SHOWN), *times_s, synchronous)
        label = f"time (us) of the first {min(ops, SHOWN)}, modelled"
        lanes.draw(ax, first.spans, ["host", "device"], COLOURS, label, first.span_s, per_s=1e6)
        point = points.get(measured)
        if point is not None and point.busy_share > 0:
            _draw_busy(ax, line, point, 1e6 * first.span_s)
        style.key(ax, COLOURS)
        ax.set_title(
            f"{ops} operators in {digits(1e3 * line.span_s)} ms: the device is busy {line.busy_share:.1%} of the time"
        )
        return _caption(line, point, *times_s)

    explorer = Explorer(
        draw,
        "a modelled time line of the host that launches and the device that computes.",
        ops=widgets.IntSlider(200, min=1, max=1000, description="operators"),
        kernel_us=widgets.FloatSlider(2, min=0.2, max=100, step=0.1, description="us a kernel"),
        launch_us=widgets.FloatSlider(10, min=0.2, max=100, step=0.1, description="us a launch"),
        synchronous=widgets.Checkbox(False, description="synchronous"),
        measured=widgets.Dropdown(value="none", options=["none", *points], description="measured"),
    )
    knobs = explorer.controls

    def choose(change):
        if (point := points.get(change["new"])) is not None and point.kernel_s > 0 and point.launch_s > 0:
            knobs["synchronous"].value = False
            knobs["kernel_us"].value, knobs["launch_us"].value = 1e6 * point.kernel_s, 1e6 * point.launch_s

    knobs["measured"].observe(choose, "value")
    return explorer


def _draw_busy(ax, line: Timeline, point: Point, end: float):
    """Two bars below the lanes: the busy share of the model and of the measurement, of the whole axis."""
    source = style.HERE if point.where == "here" else style.RECORDED
    bars = [("modelled", line.busy_share, style.BOUND), ("measured", point.busy_share, source)]
    for y, (word, share, colour) in enumerate(bars, start=2):
        side, ink = ("right", "white") if share > 0.8 else ("left", colour)
        ax.barh(y, share * end, height=0.4, color=colour)
        ax.text(share * end, y, f" {word} {share:.1%} ", va="center", ha=side, color=ink)
    ax.set_yticks(range(4), ["host", "device", "busy", "busy"])
    ax.set_ylim(3.6, -0.6)


def _caption(line: Timeline, point: Point | None, kernel_s: float, launch_s: float) -> str:
    text = f"Without any cost of launching: at most {digits(1 / line.busy_share)} times as fast."
    if point is None:
        return text
    if not point.busy_share > 0:
        return f"{text} At the chosen size nothing is measured here and nothing is recorded."
    text += f" Measured {point.where} at the chosen size: the device is busy {point.busy_share:.1%} of the time."
    if max(point.kernel_s - kernel_s, point.launch_s - launch_s) > 1e-7:  # a slider rounds, and ends somewhere
        text += f" A kernel takes {quantity(point.kernel_s, 's')} there, a launch {quantity(point.launch_s, 's')}: "
        text += "the sliders show less."
    return text
