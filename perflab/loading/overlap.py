"""A time line of copies and computation: what streams change. A model, not a measurement."""

from dataclasses import dataclass

import ipywidgets as widgets

from perflab.show import style
from perflab.show.explorer import Explorer

PAGEABLE, PINNED, SIDE = "pageable", "pinned", "pinned, side stream"


@dataclass(frozen=True)
class Span:
    """One stretch of time of one lane, in seconds: the host held, a copy, or the device computing."""

    lane: str  # "host", "copy" or "compute"
    batch: int
    start: float
    end: float


def timeline(way: str, copy_s: float, compute_s: float, steps: int = 6) -> list[Span]:
    """The first `steps` steps of a loop that copies each batch and computes on it.

    pageable: the copy waits for the stream to be empty, then holds the host until it is staged (here: until
    it is done). pinned: the host is free, but on one stream the copy waits for the computation before it.
    With a side stream the next copy runs while the device computes, one batch ahead, and each computation
    waits for its own copy.
    """
    spans: list[Span] = []
    copied = computed = began = 0.0  # the ends of the last copy and computation, the start of the latter
    for k in range(steps):
        start = max(copied, began) if way == SIDE else computed
        copied = start + copy_s
        if way == PAGEABLE:
            spans.append(Span("host", k, start, copied))
        spans.append(Span("copy", k, start, copied))
        began = max(copied, computed)
        computed = began + compute_s
        spans.append(Span("compute", k, began, computed))
    return spans


def steady_step_s(way: str, copy_s: float, compute_s: float) -> float:
    """Seconds of one step once the loop runs steadily: the sum on one stream, the longer of the two on two."""
    return max(copy_s, compute_s) if way == SIDE else copy_s + compute_s


def explore_copy() -> Explorer:
    """Sliders for the batch, the bus and the computation; which memory and stream; the time line they make."""
    colours = {"host": style.PARTS[1], "copy": style.PARTS[4], "compute": style.HERE}
    steps = 6

    def draw(ax, batch_mib: float, gb_per_s: float, compute_ms: float, way: str) -> str:
        copy_s, compute_s = batch_mib * 2**20 / (gb_per_s * 1e9), compute_ms / 1e3
        spans = timeline(way, copy_s, compute_s, steps)
        for y, lane in enumerate(colours):
            mine = [s for s in spans if s.lane == lane]
            drawn = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in mine]
            ax.broken_barh(drawn, (y - 0.35, 0.7), facecolors=colours[lane], edgecolor="white")
            for s in mine:
                ink = "white" if lane == "compute" else "black"
                ax.text(500 * (s.start + s.end), y, str(s.batch + 1), color=ink, ha="center", va="center", fontsize=8)
        ax.set_yticks(range(len(colours)), list(colours))
        ax.set_ylim(len(colours) - 0.4, -0.6)
        ax.set_xlim(0, 1e3 * steps * (copy_s + compute_s))
        ax.set_xlabel(f"time (ms) of the first {steps} steps, modelled", loc="left")
        ax.grid(axis="y", visible=False)
        step_s, least_s = steady_step_s(way, copy_s, compute_s), max(copy_s, compute_s)
        ax.set_title(f"A copy of {1e3 * copy_s:.3g} ms beside {compute_ms:g} ms: a step every {1e3 * step_s:.3g} ms")
        best = (copy_s + compute_s) / least_s
        if way == SIDE:
            return f"Overlapped: {best:.2f} times as fast as in turn, the most that hiding can give here."
        free = "the host is free meanwhile" if way == PINNED else "and the host can do nothing else meanwhile"
        return f"Copy and computation take turns, {free}. Overlapped, it would be {best:.2f} times as fast."

    return Explorer(
        draw,
        "a modelled time line: the host held by a copy, the copies, the computation; numbers are batches.",
        batch_mib=widgets.FloatSlider(64, min=1, max=256, step=1, description="MiB a batch"),
        gb_per_s=widgets.FloatSlider(25, min=2, max=60, step=1, description="GB/s"),
        compute_ms=widgets.FloatSlider(4, min=0.5, max=50, step=0.5, description="ms to compute"),
        way=widgets.Dropdown(value=PINNED, options=[PAGEABLE, PINNED, SIDE], description="memory"),
    )
