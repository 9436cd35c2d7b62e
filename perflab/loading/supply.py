"""Supply against demand: how workers feed a training step. A model of the DataLoader, not a measurement."""

from dataclasses import dataclass

import ipywidgets as widgets

from perflab.show import style
from perflab.show.explorer import Explorer


@dataclass(frozen=True)
class Span:
    """One stretch of time of one lane, in seconds: a worker loading, or the step waiting or computing."""

    lane: str
    kind: str  # "load", "wait" or "step"
    start: float
    end: float


def timeline(
    sample_s: float, batch: int, workers: int, step_s: float, cores: int, steps: int = 12, prefetch: int = 2
) -> list[Span]:
    """The first `steps` steps of a loop, as spans of seconds.

    Each worker loads whole batches one after the other, `workers * prefetch` of them are in flight, and
    batches are used in order, as in torch's DataLoader. More workers than cores share the cores evenly.
    Without workers the loop loads and steps in turn.
    """
    load_s = sample_s * batch * max(1.0, workers / cores)
    spans: list[Span] = []
    asked = [0.0] * steps  # when the main process asks for each batch
    free = [0.0] * max(1, workers)  # when each worker is done with what it was given
    now = 0.0
    for k in range(steps):
        if workers:
            w = k % workers
            start = max(free[w], asked[k])
            ready = free[w] = start + load_s
            spans.append(Span(f"worker {w + 1}", "load", start, ready))
            if ready > now:
                spans.append(Span("step", "wait", now, ready))
            now = max(now, ready)
            if k + workers * prefetch < steps:
                asked[k + workers * prefetch] = now
        else:
            spans.append(Span("step", "wait", now, now + load_s))
            now += load_s
        spans.append(Span("step", "step", now, now + step_s))
        now += step_s
    return spans


def steady_step_s(sample_s: float, batch: int, workers: int, step_s: float, cores: int) -> float:
    """Seconds of one step once the loop runs steadily: the slower of supply and demand; their sum without
    workers."""
    load_s = sample_s * batch
    return load_s + step_s if not workers else max(step_s, load_s / min(workers, cores))


def explore_supply() -> Explorer:
    """Sliders for the cost of a sample, the workers and the step; the time line and the stall they make."""
    colours = {"load": style.PARTS[4], "wait": style.PARTS[1], "step": style.HERE}

    def draw(ax, sample_ms: float, batch: int, workers: int, step_ms: float, cores: int) -> str:
        settings = (sample_ms / 1e3, batch, workers, step_ms / 1e3, cores)
        spans = timeline(*settings)
        lanes = ["step"] + [f"worker {w + 1}" for w in range(min(workers, 8))]
        for y, lane in enumerate(lanes):
            drawn = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans if s.lane == lane]
            kinds = [colours[s.kind] for s in spans if s.lane == lane]
            ax.broken_barh(drawn, (y - 0.35, 0.7), facecolors=kinds, edgecolor="white")
        ax.set_yticks(range(len(lanes)), lanes)
        ax.set_ylim(len(lanes) - 0.4, -0.6)
        ax.set_xlabel("time (ms) of the first 12 steps, modelled", loc="left")
        ax.grid(axis="y", visible=False)
        step = steady_step_s(*settings)
        stall = 1 - step_ms / 1e3 / step
        how = "loading and stepping overlap" if workers else "loading and stepping take turns"
        ax.set_title(f"A step every {1e3 * step:.0f} ms, waiting {stall:.0%} of it: {how}")
        style.key(ax, colours)
        hidden = f" {workers - 8} more workers are not drawn." if workers > 8 else ""
        needed = sample_ms * batch / step_ms
        return f"This step needs {needed:.2g} cores that only load; you have {cores}.{hidden}"

    return Explorer(
        draw,
        "a modelled time line of the step and its workers; orange is waiting for data.",
        sample_ms=widgets.FloatSlider(5, min=0.5, max=25, step=0.5, description="ms a sample"),
        batch=widgets.IntSlider(32, min=4, max=128, step=4, description="batch"),
        workers=widgets.IntSlider(2, min=0, max=16, description="workers"),
        step_ms=widgets.FloatSlider(40, min=5, max=300, step=5, description="ms a step"),
        cores=widgets.IntSlider(4, min=1, max=16, description="cores"),
    )
