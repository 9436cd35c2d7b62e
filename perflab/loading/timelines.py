"""Models of loading and copying on a time line, with their explorers. Nothing here is measured."""

import itertools

import ipywidgets as widgets

from perflab.show import lanes, style
from perflab.show.explorer import Explorer
from perflab.show.lanes import Span

PAGEABLE, PINNED, SIDE = "pageable", "pinned", "pinned, side stream"


# -- workers that feed a loop


def load_times(mean_s: float, burst: float, batches: int) -> list[float]:
    """Seconds that each batch takes a worker: every fifth takes `burst` times the mean, the others less, so
    that the mean stays. `burst` is 1 (all alike) to 5 (the others take no time)."""
    short = (5 - burst) / 4
    return [mean_s * (burst if k % 5 == 4 else short) for k in range(batches)]


def queue(loads: list[float], step_s: float, workers: int, prefetch: int = 2, in_order: bool = True) -> list[Span]:
    """The spans of a loop of steps of `step_s` seconds, over batches that load in `loads` seconds each.

    As in torch's DataLoader: workers are asked in turn, `workers * prefetch` batches ahead; each batch that
    is taken asks for one more. In order, a batch waits for those before it; otherwise the loop takes what
    is ready, and only a worker with fewer than `prefetch` batches outstanding is asked. Without workers the
    loop loads and steps in turn.
    """
    spans: list[Span] = []
    now = 0.0
    if not workers:
        for load_s in loads:
            loaded, stepped = now + load_s, now + load_s + step_s
            spans += [Span("loop", "wait", now, loaded), Span("loop", "step", loaded, stepped)]
            now = stepped
        return spans
    free_at, outstanding = [0.0] * workers, [0] * workers
    asked: dict[int, tuple[float, int]] = {}  # batch -> when it is ready, and whose it is
    turn, batches = itertools.cycle(range(workers)), iter(range(len(loads)))

    def ask():
        batch = next(batches, None)
        if batch is None:
            return
        worker = next(w for w in turn if in_order or outstanding[w] < prefetch)
        start = max(free_at[worker], now)
        free_at[worker] = start + loads[batch]
        outstanding[worker] += 1
        asked[batch] = free_at[worker], worker
        spans.append(Span(f"worker {worker + 1}", "load", start, free_at[worker]))

    for _ in range(workers * prefetch):
        ask()
    while asked:
        batch = min(asked) if in_order else min(asked, key=lambda k: (max(asked[k][0], now), k))
        ready, worker = asked.pop(batch)
        outstanding[worker] -= 1
        if ready > now:
            spans.append(Span("loop", "wait", now, ready))
            now = ready
        ask()
        spans.append(Span("loop", "step", now, now + step_s))
        now += step_s
    return spans


def waiting(spans: list[Span]) -> float:
    """The share of the loop's time that is spent waiting, the first batch left out."""
    loop = [span for span in spans if span.lane == "loop"]
    steady = loop[1:] if loop[0].kind == "wait" else loop
    return sum(span.end - span.start for span in steady if span.kind == "wait") / (steady[-1].end - steady[0].start)


def _of_loader(ax, spans: list[Span], workers: int, most: int, label: str, until_s: float = 0):
    colours = {"load": style.PARTS[4], "wait": style.PARTS[1], "step": style.HERE}
    lanes.draw(ax, spans, ["loop", *(f"worker {w + 1}" for w in range(min(workers, most)))], colours, label, until_s)
    style.key(ax, colours)


def explore_supply() -> Explorer:
    """Sliders for the cost of a sample, the workers and the step; the time line and the stall they make."""

    def draw(ax, sample_ms: float, batch: int, workers: int, step_ms: float, cores: int) -> str:
        load_s, step_s = sample_ms * batch / 1e3, step_ms / 1e3
        spans = queue([load_s * max(1.0, workers / cores)] * 12, step_s, workers)
        _of_loader(ax, spans, workers, 8, "time (ms) of the first 12 steps, modelled")
        steady_s = max(step_s, load_s / min(workers, cores)) if workers else load_s + step_s
        how = "loading and stepping overlap" if workers else "loading and stepping take turns"
        ax.set_title(f"A step every {1e3 * steady_s:.0f} ms, waiting {1 - step_s / steady_s:.0%} of it: {how}")
        hidden = f" {workers - 8} more workers are not drawn." if workers > 8 else ""
        return f"This step needs {sample_ms * batch / step_ms:.2g} cores that only load; you have {cores}.{hidden}"

    return Explorer(
        draw,
        "a modelled time line of the step and its workers; orange is waiting for data.",
        sample_ms=widgets.FloatSlider(5, min=0.5, max=25, step=0.5, description="ms a sample"),
        batch=widgets.IntSlider(32, min=4, max=128, step=4, description="batch"),
        workers=widgets.IntSlider(2, min=0, max=16, description="workers"),
        step_ms=widgets.FloatSlider(40, min=5, max=300, step=5, description="ms a step"),
        cores=widgets.IntSlider(4, min=1, max=16, description="cores"),
    )


def explore_flight() -> Explorer:
    """Sliders for the time of a batch, its spread, and the knobs; the time line of the loop and its stalls."""

    def draw(ax, batch_ms, burst, workers, prefetch, step_ms, in_order, batch_mib) -> str:
        spans = queue(load_times(batch_ms / 1e3, burst, 400), step_ms / 1e3, workers, prefetch, in_order)
        _of_loader(ax, spans, workers, 6, "time (ms), modelled", 30 * max(step_ms, batch_ms / workers) / 1e3)
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


# -- copies beside a computation


def copies(way: str, copy_s: float, compute_s: float, steps: int = 6) -> list[Span]:
    """The first `steps` steps of a loop that copies each batch and computes on it.

    pageable: the copy waits for the stream to be empty, then holds the host until it is staged (here: until
    it is done). pinned: the host is free, but on one stream the copy waits for the computation before it.
    With a side stream the next copy runs while the device computes, one batch ahead, and each computation
    waits for its own copy.
    """
    spans: list[Span] = []
    copied = computed = began = 0.0  # the ends of the last copy and computation, the start of the latter
    for k in range(1, steps + 1):
        start = max(copied, began) if way == SIDE else computed
        copied = start + copy_s
        began = max(copied, computed)
        computed = began + compute_s
        spans += [Span("copy", "copy", start, copied, k), Span("compute", "compute", began, computed, k)]
        if way == PAGEABLE:
            spans.append(Span("host", "host", start, copied, k))
    return spans


def explore_copy() -> Explorer:
    """Sliders for the batch, the bus and the computation; which memory and stream; the time line they make."""
    colours = {"host": style.PARTS[1], "copy": style.PARTS[4], "compute": style.HERE}

    def draw(ax, batch_mib: float, gb_per_s: float, compute_ms: float, way: str) -> str:
        copy_s, compute_s = batch_mib * 2**20 / (gb_per_s * 1e9), compute_ms / 1e3
        in_turn_s, least_s = copy_s + compute_s, max(copy_s, compute_s)
        label = "time (ms) of the first 6 steps, modelled"
        lanes.draw(ax, copies(way, copy_s, compute_s), list(colours), colours, label, 6 * in_turn_s)
        step_s = least_s if way == SIDE else in_turn_s
        ax.set_title(f"A copy of {1e3 * copy_s:.3g} ms beside {compute_ms:g} ms: a step every {1e3 * step_s:.3g} ms")
        best = in_turn_s / least_s
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
