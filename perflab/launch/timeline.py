"""The host that launches and the device that computes, on one time line. A model, not a measurement."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ipywidgets as widgets

from perflab.bench import machine
from perflab.bench.result import Result
from perflab.bench.units import digits, quantity
from perflab.errors import PerflabError
from perflab.show import style
from perflab.show.explorer import Explorer

SHOWN = 10  # operators on the drawn time line


@dataclass(frozen=True)
class Timeline:
    """Intervals (start, end) in seconds of each operator on the host and on the device."""

    host: list[tuple[float, float]]
    device: list[tuple[float, float]]
    kernel_s: float
    period_s: float  # from one operator to the next, once the row runs steadily

    @property
    def span_s(self) -> float:
        """From the first launch to the end of the last kernel."""
        return max(self.host[-1][1], self.device[-1][1])

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
    Raises PerflabError for no operator, or for times that are negative or both zero.
    """
    times = kernel_s, launch_s
    if not (isinstance(ops, int) and ops >= 1 and all(0 <= t < math.inf for t in times) and sum(times) > 0):
        raise PerflabError(
            f"No time line of {ops} operators with kernels of {kernel_s} s and launches of {launch_s} s: "
            "take at least one operator, and times above zero."
        )
    host, device, free, done = [], [], 0.0, 0.0
    for _ in range(ops):
        launched = free + launch_s
        host.append((free, launched))
        start = max(launched, done)
        done = start + kernel_s
        device.append((start, done))
        free = done if synchronous else launched
    return Timeline(host, device, kernel_s, kernel_s + launch_s if synchronous else max(kernel_s, launch_s))


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
    colours = {"launch": style.PARTS[1], "host waits": style.PARTS[4], "kernel": style.HERE}

    def draw(ax, ops: int, kernel_us: float, launch_us: float, synchronous: bool, measured: str) -> str:
        line = predicted(ops, kernel_us / 1e6, launch_us / 1e6, synchronous)
        shown = min(ops, SHOWN)
        lanes = [(0, line.host, "launch"), (1, line.device, "kernel")]
        if synchronous:
            waits = [(launched, end) for (_, launched), (_, end) in zip(line.host, line.device, strict=True)]
            lanes.append((0, waits, "host waits"))
        for y, spans, what in lanes:
            bars = [(1e6 * start, 1e6 * (end - start)) for start, end in spans[:shown]]
            ax.broken_barh(bars, (y - 0.35, 0.7), facecolors=colours[what], edgecolor="white")
        end = 1e6 * max(line.host[shown - 1][1], line.device[shown - 1][1])
        names, point = ["host", "device"], points.get(measured)
        if point is not None and point.busy_share > 0:
            colour = style.HERE if point.where == "here" else style.RECORDED
            for share, word, ink in [
                (line.busy_share, "modelled", style.BOUND),
                (point.busy_share, "measured", colour),
            ]:
                ax.barh(len(names), share * end, height=0.4, color=ink)
                inside = share > 0.8
                at, side = share * end, "right" if inside else "left"
                ax.text(at, len(names), f" {word} {share:.1%} ", va="center", ha=side, color="white" if inside else ink)
                names.append("busy")
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_xlim(0, end)
        ax.set_xlabel(f"time (us) of the first {shown}, modelled", loc="left")
        ax.grid(axis="y", visible=False)
        style.key(ax, colours)
        ax.set_title(
            f"{ops} operators in {digits(1e3 * line.span_s)} ms: the device is busy {line.busy_share:.1%} of the time"
        )
        return _caption(line, point, 1e-6 * kernel_us, 1e-6 * launch_us)

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


def _caption(line: Timeline, point: Point | None, kernel_s: float, launch_s: float) -> str:
    bound = 1 / line.busy_share if line.busy_share else float("inf")
    said = f"Without any cost of launching: at most {digits(bound)} times as fast."
    if point is None:
        return said
    if not point.busy_share > 0:
        return f"{said} At the chosen size nothing is measured here and nothing is recorded."
    said = f"{said} Measured {point.where} at the chosen size: the device is busy {point.busy_share:.1%} of the time."
    if max(point.kernel_s - kernel_s, point.launch_s - launch_s) > 1e-7:  # a slider rounds, and ends somewhere
        said += f" A kernel takes {quantity(point.kernel_s, 's')} there, a launch {quantity(point.launch_s, 's')}: "
        said += "the sliders show less."
    return said
