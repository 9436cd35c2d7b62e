"""What a trace shows to be wrong: each fault with its share, its place, and what mending it can gain at most.

The bound is Amdahl's: a share s of the time, gone altogether, makes the rest 1 / (1 - s) times as fast. A
device that is kept busy has no finding.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import covered, union

from . import gaps
from .host import NODE, Where

TINY, SYNC, DATA = "tiny kernels", "synchronise", "waiting for data"
PAGEABLE, IN_TURN, ALLOCATE = "pageable copies", "copies in turn", "allocating memory"
HOST, ONE_BLOCK, MEMORY = "host work", "one-block kernels", "memory peak in backward"

NOISE = 0.05  # share of the span: the removal of less than that gains less than many machines' noise
LEAST = {
    DATA: NOISE,
    ALLOCATE: NOISE,
    HOST: NOISE,
    PAGEABLE: NOISE,
    IN_TURN: 2 * NOISE,
    # waits in every step are named earlier: one line mends them, and they return with every step
    SYNC: 0.01,
    # every trace has some gaps between launches, if only at its edges or because the profiler slows the host
    TINY: 0.10,
    # share in which multiprocessors are empty: the ends of a net always have a few small reductions
    ONE_BLOCK: 0.10,
    # share of the peak that backward needs for a while only: it frees what forward saved while it allocates
    # gradients, so an ordinary step rises by a layer or two, or by a loss in fp32
    MEMORY: 0.35,
}
"""The share from which each fault is named."""

LONG = 1_000_000
"""Nanoseconds of a host that launches nothing and is in no operator, from which this is other work. A launch
with all of Python, dispatcher and autograd around it takes 5 to 50 us, the start of a backward pass or of an
optimizer up to some hundred, with the profiler."""

LEAST_LAUNCHES = 20
"""Late launches before one speaks of a pattern."""

ALONE = 20_000
"""Nanoseconds from which a kernel with few blocks matters by itself: a shorter one is over before the host
launches the next few, and filling it would not show."""


class Fault(NamedTuple):
    """A fault: share of the span (of the peak for memory), where, one sentence, and the gain at most (a factor)."""

    name: str
    share: float
    where: Where
    sentence: str
    gain: float


def findings(trace) -> list[Fault]:
    """The faults of a Trace, the largest share first; see `trace.Trace.findings`."""
    if not trace.span_ns:
        return []
    rules = (_data, _synchronise, _allocate, _copies, _launches, _other_work, _one_block, _memory)
    candidates = [fault for fault in (rule(trace) for rule in rules) if fault is not None]
    faults = [fault for fault in candidates if fault.share >= LEAST[fault.name]]
    return sorted(faults, key=lambda fault: (fault.name == MEMORY, -fault.share))


# -- sentences and places


def _timed(name: str, share: float, where: Where, what: str) -> Fault:
    gain = 1 / (1 - share) if share < 1 else float("inf")
    sentence = f"{name}: {what} Without it, at most {gain:.2f} times as fast."
    return Fault(name, share, where, sentence, gain)


def _idle(share: float) -> str:
    return f"the device is idle {share:.0%} of the time"


def _at(where: Where) -> str:
    begins = where.operator or ("" if where.phase else where.frame)
    return f"at {where}" if begins else str(where)


def _heaviest(things: Iterable, weights: Iterable[float], otherwise=None):
    """Of the things, some of which come often, the one whose weights add up to most."""
    sums: Counter = Counter()
    for thing, weight in zip(things, weights, strict=True):
        sums[thing] += weight
    return sums.most_common(1)[0][0] if sums else otherwise


def _place_of(idle: Sequence[gaps.Gap]) -> Where:
    """The place, whatever the step, with the longest of these gaps in all."""
    places = [gap.place._replace(step=None) for gap in idle]
    return _heaviest(places, [gap.length_s for gap in idle], Where())


def _launched_at(trace, chosen: np.ndarray) -> Where:
    """The place, whatever the step, that launched most of the chosen events' time."""
    chosen = chosen & (trace.call >= 0)
    launches = trace.launched_by[chosen]
    places = [place._replace(step=None) for place in trace.places.at(launches.thread, launches.start)]
    return _heaviest(places, trace.durations[chosen].tolist(), Where())


def _explained(trace, cause: str) -> tuple[float, Where]:
    """The share of the span that a cause of gaps explains, and the place with the longest of them."""
    return trace.idle.get(cause, 0), _place_of([gap for gap in trace.gaps if gap.cause == cause])


# -- rules: what a trace shows of one fault, however small


def _data(trace) -> Fault:
    share, where = _explained(trace, gaps.DATA)
    return _timed(DATA, share, where, f"{_idle(share)} while the loop waits for its next batch, {where}.")


def _synchronise(trace) -> Fault | None:
    """Waits for the device. One wait is how a loss is logged, and so are several that cost little."""
    share, where = _explained(trace, gaps.SYNC)
    waits = len({(piece.thread, piece.time) for piece in trace.gap_pieces if piece.cause == gaps.SYNC})
    every_step = max(2, len(trace.steps) - 1)  # the wait of the last step has no gap after it
    if waits < (2 if share >= NOISE else every_step):
        return None
    what = f"{waits} times the host waits for the device, which then waits for the host"
    return _timed(SYNC, share, where, f"{what}: {_idle(share)} for it, most of it {_at(where)}.")


def _allocate(trace) -> Fault:
    share, where = _explained(trace, gaps.ALLOCATE)
    what = f"{_idle(share)} while the host allocates memory, most of it {_at(where)}."
    return _timed(ALLOCATE, share, where, what)


def _copies(trace) -> Fault:
    """Copies to the device while it computes nothing, and the gaps that they make."""
    copies = trace.recording.matching("HtoD", trace.events)
    exposed, pageable = trace.alone_ns(copies, ~copies), trace.alone_ns(copies & trace.is_pageable, ~copies)
    share = exposed / trace.span_ns + trace.idle.get(gaps.COPY, 0)
    if pageable >= exposed / 2 > 0:
        where = _launched_at(trace, trace.is_pageable)
        what = f"{share:.0%} of the time the device only copies from pageable memory, or waits for that: {where}."
        cure = "Pinned memory, non_blocking=True and a side stream can hide it."
        return _timed(PAGEABLE, share, where, f"{what} {cure}")
    where = _launched_at(trace, copies)
    what = f"{share:.0%} of the time the device only copies, or waits for a copy: {where}."
    return _timed(IN_TURN, share, where, f"{what} A side stream can copy the next batch meanwhile.")


def _late_launches(trace) -> tuple[list[gaps.Gap], list[gaps.Gap]]:
    """The gaps before launches that come late: while the host launches others, and while it does other work."""
    operators, notes, places = trace.recording.operators, trace.recording.notes, trace.places
    launches = np.isin(operators.thread, [places.main, *np.unique(trace.launched_by.thread)])
    outer = operators[launches & (places.operators.parent[:-1] < 0)]
    optimizers = notes[trace.recording.matching(r"^Optimizer\.", notes)]
    launching = union(np.append(outer.start, optimizers.start), np.append(outer.end, optimizers.end))
    pieces = [piece for piece in trace.gap_pieces if piece.cause == gaps.HOST]
    start, end = (np.array([getattr(piece, edge) for piece in pieces], np.int64) for edge in ("start", "end"))
    is_other = end - start - covered(launching, start, end) >= LONG
    late = [gap for gap in trace.gaps if gap.cause == gaps.HOST]
    return list(itertools.compress(late, ~is_other)), list(itertools.compress(late, is_other))


def _launches(trace) -> Fault | None:
    """The price of launching: many launches, each of them late."""
    late, _ = _late_launches(trace)
    if len(late) < LEAST_LAUNCHES:
        return None
    lengths = [gap.length_s for gap in late]
    share, where = sum(lengths) / trace.span_s, Where(phase=_heaviest([gap.place.phase for gap in late], lengths))
    median = np.median(trace.durations[trace.events.kind == 0]) / 1e3
    launches = f"{trace.launches + trace.graph_launches:,} launches of kernels of {median:.1f} us in the median"
    busy = f"the host launches more slowly than the device works, which is busy {trace.busy_share:.0%} of the time"
    return _timed(TINY, share, where, f"{launches}: {busy} and idle most {where}.")


def _other_work(trace) -> Fault:
    _, late = _late_launches(trace)
    share, where = sum(gap.length_s for gap in late) / trace.span_s, _place_of(late)
    what = f"{_idle(share)} while the host does other work than launching, most of it {_at(where)}."
    return _timed(HOST, share, where, what)


def _one_block(trace) -> Fault | None:
    """Kernels that are long, run alone and leave multiprocessors empty."""
    events = trace.events
    chosen = trace.is_small & (trace.durations >= ALONE)
    if not chosen.any():
        return None
    kernels = zip(events.name[chosen].tolist(), events.blocks[chosen].tolist(), strict=True)
    name, blocks = _heaviest(kernels, trace.durations[chosen].tolist())
    share, where = _empty_ns(trace, chosen) / trace.span_ns, _launched_at(trace, chosen & (events.name == name))
    what = f"the device counts as busy {trace.busy_share:.0%} of the time, but {share:.0%} of it is empty"
    why = f"{trace.kernel(name)} has {blocks} blocks for {trace.multiprocessors} multiprocessors"
    return _timed(ONE_BLOCK, share, where, f"{what}: {why} ({where}).")


def _empty_ns(trace, chosen: np.ndarray) -> float:
    """Nanoseconds in which the chosen kernels run and no other, weighted by the multiprocessors without a block."""
    events = trace.events
    times = np.append(events.start[chosen], events.end[chosen])
    blocks = np.append(events.blocks[chosen], -events.blocks[chosen])
    order = np.argsort(times, kind="stable")
    start, end = times[order][:-1], times[order][1:]
    filled = np.minimum(blocks[order].cumsum()[:-1] / trace.multiprocessors, 1)
    alone = end - start - covered(trace.busy_with((events.kind == 0) & ~chosen), start, end)
    return float((alone * (1 - filled))[filled > 0].sum())


def _memory(trace) -> Fault | None:
    """Memory that a backward pass needs for a while and gives back, if memory peaks in one.

    The pass lasts from the first autograd node of its step to the last.
    """
    peak, operators = trace.peak, trace.recording.operators
    steps = [step for step in trace.places.steps.spans if peak and step.start <= peak.time < step.end]
    if not steps:
        return None
    first, last = steps[0].start, steps[0].end
    is_node = trace.recording.matching(f"^{NODE}", operators)
    nodes = operators[is_node & (operators.start >= first) & (operators.start < last)]
    times, totals = trace.allocations.time, trace.allocations.total
    begin = np.searchsorted(times, nodes.start.min(initial=last))
    end = np.searchsorted(times, nodes.end.max(initial=first), side="right")
    if peak.bytes not in totals[begin:end]:
        return None
    share = float(peak.bytes - max(totals[max(0, begin - 1)], totals[end - 1])) / peak.bytes
    what = f"allocated memory is highest in step {peak.where.step}, {peak.bytes / 2**20:,.0f} MiB"
    why = f"{share:.0%} of it is there neither when backward begins nor when it ends"
    return Fault(MEMORY, share, peak.where, f"{MEMORY}: {what}, {peak.where}; {why}.", 1.0)
