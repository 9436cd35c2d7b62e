"""Batches in flight on a time line: a model of the DataLoader's queue, not a measurement."""

import itertools

import ipywidgets as widgets

from perflab.show import style
from perflab.show.explorer import Explorer

from .supply import Span

LONG_EVERY = 5


def load_times(mean_s: float, burst: float, batches: int) -> list[float]:
    """Seconds that each batch takes a worker: every fifth takes `burst` times the mean, the others less, so
    that the mean stays. `burst` is 1 (all alike) to 5 (the others take no time)."""
    short = (LONG_EVERY - burst) / (LONG_EVERY - 1)
    return [mean_s * (burst if k % LONG_EVERY == LONG_EVERY - 1 else short) for k in range(batches)]


def queue(loads: list[float], step_s: float, workers: int, prefetch: int, in_order: bool = True) -> list[Span]:
    """The spans of a loop of steps of `step_s` seconds, over batches that load in `loads` seconds each.

    As in torch's DataLoader: workers are asked in turn, `workers * prefetch` batches ahead; each batch that
    is taken asks for one more. In order, a batch waits for those before it; otherwise the loop takes what
    is ready, and only a worker with fewer than `prefetch` batches outstanding is asked.
    """
    spans: list[Span] = []
    free, held = [0.0] * workers, [0] * workers
    out: dict[int, tuple[float, int]] = {}  # batch -> when it is ready, and whose it is
    turn, coming = itertools.cycle(range(workers)), iter(range(len(loads)))

    def ask(now: float):
        k = next(coming, None)
        if k is not None:
            w = next(w for w in turn if in_order or held[w] < prefetch)
            start = max(free[w], now)
            free[w] = start + loads[k]
            held[w] += 1
            out[k] = free[w], w
            spans.append(Span(f"worker {w + 1}", "load", start, free[w]))

    for _ in range(workers * prefetch):
        ask(0.0)
    now = 0.0
    while out:
        k = min(out) if in_order else min(out, key=lambda batch: (max(out[batch][0], now), batch))
        ready, w = out.pop(k)
        held[w] -= 1
        if ready > now:
            spans.append(Span("loop", "wait", now, ready))
            now = ready
        ask(now)
        spans.append(Span("loop", "step", now, now + step_s))
        now += step_s
    return spans


def waiting(spans: list[Span]) -> float:
    """The share of the loop's time that is spent waiting, the first batch left out."""
    loop = [s for s in spans if s.lane == "loop"]
    steady = loop[1:] if loop and loop[0].kind == "wait" else loop
    total = sum(s.end - s.start for s in steady)
    return sum(s.end - s.start for s in steady if s.kind == "wait") / total if total else 0.0


def explore_flight() -> Explorer:
    """Sliders for the time of a batch, its spread, and the knobs; the time line of the loop and its stalls."""
    colours = {"load": style.PARTS[4], "wait": style.PARTS[1], "step": style.HERE}

    def draw(ax, batch_ms, burst, workers, prefetch, step_ms, in_order, batch_mib) -> str:
        loads = load_times(batch_ms / 1e3, burst, 400)
        spans = queue(loads, step_ms / 1e3, workers, prefetch, in_order)
        shown_s = 30 * max(step_ms, batch_ms / workers) / 1e3
        lanes = ["loop"] + [f"worker {w + 1}" for w in range(min(workers, 6))]
        for y, lane in enumerate(lanes):
            drawn = [s for s in spans if s.lane == lane and s.start < shown_s]
            bars = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in drawn]
            ax.broken_barh(bars, (y - 0.35, 0.7), facecolors=[colours[s.kind] for s in drawn], edgecolor="white")
        ax.set_yticks(range(len(lanes)), lanes)
        ax.set_ylim(len(lanes) - 0.4, -0.6)
        ax.set_xlim(0, 1e3 * shown_s)
        ax.set_xlabel("time (ms), modelled", loc="left")
        ax.grid(axis="y", visible=False)
        style.key(ax, colours)
        ax.set_title(f"The loop waits {waiting(spans):.0%} of its time, over 400 batches")
        ahead = workers * prefetch
        supply = "" if batch_ms <= workers * step_ms else " The workers are too slow in the mean: nothing ahead helps."
        return f"{ahead} batches in flight: {ahead * batch_mib:,.0f} MiB of shared memory.{supply}"

    return Explorer(
        draw,
        "a modelled time line of the loop and its workers; orange is waiting for a batch.",
        batch_ms=widgets.FloatSlider(30, min=5, max=100, step=5, description="ms a batch"),
        burst=widgets.FloatSlider(3.5, min=1, max=5, step=0.5, description="longest / mean"),
        workers=widgets.IntSlider(2, min=1, max=16, description="workers"),
        prefetch=widgets.IntSlider(1, min=1, max=16, description="prefetch_factor"),
        step_ms=widgets.FloatSlider(20, min=5, max=100, step=5, description="ms a step"),
        in_order=widgets.Checkbox(True, description="in_order"),
        batch_mib=widgets.FloatSlider(38, min=1, max=512, step=1, description="MiB a batch"),
    )
