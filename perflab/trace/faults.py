"""What a trace shows to be wrong: each fault with its share, its place, and what mending it can gain at most.

The bound is Amdahl's: a share s of the time, gone altogether, makes the rest 1 / (1 - s) times as fast. A
device that is kept busy has no finding.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import covered, length, union, without

from . import gaps
from .host import Where

TINY, SYNC, DATA = "tiny kernels", "synchronise", "waiting for data"
PAGEABLE, IN_TURN, ALLOCATE = "pageable copies", "copies in turn", "allocating memory"
HOST, ONE_BLOCK, MEMORY = "host work", "one-block kernels", "memory peak in backward"

LEAST = 0.05
"""Share of the span from which a cause is named: below, its removal gains less than the noise of many machines."""

LEAST_SYNC = 0.01
"""Waits in every step are named earlier: one line mends them, and they return with every step. One wait is how
a loss is logged, and so are several that cost little."""

LEAST_TINY = 0.10
"""Every trace has some gaps between launches, if only at its edges or because the profiler slows the host."""

LONG = 1_000_000
"""Nanoseconds of a host that launches nothing and is in no operator, from which this is other work. A launch
with all of Python, dispatcher and autograd around it takes 5 to 50 us, the start of a backward pass or of an
optimizer up to some hundred, with the profiler."""

LEAST_LAUNCHES = 20
"""Late launches before one speaks of a pattern."""

ALONE = 20_000
"""Nanoseconds from which a kernel with few blocks matters by itself: a shorter one is over before the host
launches the next few, and filling it would not show."""

LEAST_EMPTY = 0.10
"""Share of the span in which multiprocessors are empty for want of blocks. The ends of a net always have a
few small reductions."""

LEAST_SWELL = 0.35
"""Share of the peak that backward needs for a while only. Backward frees what forward saved while it
allocates gradients, so an ordinary step swells by a layer or two, or by a loss in fp32."""


class Fault(NamedTuple):
    """A fault: share of the span (of the peak for memory), where, one sentence, and the gain at most (a factor)."""

    name: str
    share: float
    where: Where
    sentence: str
    gain: float


def findings(trace) -> list[Fault]:
    """The faults of a Trace, the largest share first; see `trace.Trace.findings`."""
    rules = (_waits, _copies, _host, _one_block, _memory)
    found = [finding for rule in rules for finding in rule(trace)]
    return sorted(found, key=lambda f: (f.name == MEMORY, -f.share))


def _timed(name: str, share: float, where: Where, what: str) -> Fault:
    gain = 1 / (1 - share) if share < 1 else float("inf")
    sentence = f"{name}: {what} Without it, at most {gain:.2f} times as fast."
    return Fault(name, share, where, sentence, gain)


def _waits(trace):
    idle = trace.idle
    if (share := idle.get(gaps.DATA, 0)) >= LEAST:
        where = costliest(trace, gaps.DATA)
        yield _timed(DATA, share, where, f"{_idle(share)} while the loop waits for its next batch, {where}.")
    share = idle.get(gaps.SYNC, 0)
    waits = len({(p.thread, p.time) for p in trace.gap_pieces if p.cause == gaps.SYNC})
    often = 2 if share >= LEAST else max(2, len(trace.steps) - 1)  # the wait of the last step has no gap after it
    if share >= LEAST_SYNC and waits >= often:
        where = costliest(trace, gaps.SYNC)
        what = f"{waits} times the host waits for the device, which then waits for the host: "
        yield _timed(SYNC, share, where, f"{what}{_idle(share)} for it, most of it {_at(where)}.")
    if (share := idle.get(gaps.ALLOCATE, 0)) >= LEAST:
        where = costliest(trace, gaps.ALLOCATE)
        what = f"{_idle(share)} while the host allocates memory, most of it"
        yield _timed(ALLOCATE, share, where, f"{what} {_at(where)}.")


def _idle(share: float) -> str:
    return f"the device is idle {share:.0%} of the time"


def _at(where: Where) -> str:
    begins = where.operator or ("" if where.phase else where.frame)
    return f"at {where}" if begins else str(where)


def costliest(trace, cause: str, chosen: np.ndarray | None = None) -> Where:
    """The place, whatever the step, with the longest gaps of this cause, of all or of the chosen pieces."""
    spent: Counter = Counter()
    for i, (piece, gap) in enumerate(zip(trace.gap_pieces, trace.gaps, strict=True)):
        if piece.cause == cause and (chosen is None or chosen[i]):
            spent[gap.place._replace(step=None)] += piece.end - piece.start
    return spent.most_common(1)[0][0] if spent else Where()


def _copies(trace):
    """Copies to the device while it computes nothing, and the gaps that they make."""
    pageable, exposed = exposed_copies(trace)
    waiting = trace.idle.get(gaps.COPY, 0)
    share = exposed + waiting
    if share >= LEAST and pageable >= exposed / 2 > 0:
        where = _launched_at(trace, trace.is_held_copy)
        what = f"{share:.0%} of the time the device only copies from pageable memory, or waits for that: {where}."
        cure = "Pinned memory, non_blocking=True and a side stream can hide it."
        yield _timed(PAGEABLE, share, where, f"{what} {cure}")
    elif share >= 2 * LEAST:
        where = _launched_at(trace, to_device(trace))
        what = f"{share:.0%} of the time the device only copies, or waits for a copy: {where}."
        yield _timed(IN_TURN, share, where, f"{what} A side stream can copy the next batch meanwhile.")


def to_device(trace) -> np.ndarray:
    """Per device event: a copy from the host to the device."""
    return np.array(["HtoD" in name for name in trace.recording.names] or [False])[trace.events.name]


def exposed_copies(trace) -> tuple[float, float]:
    """Shares of the span in which copies to the device run and nothing else: from pageable memory, and all."""
    events, copies = trace.events, to_device(trace)
    rest = union(events.start[~copies], events.end[~copies])
    shares = []
    for chosen in (copies & trace.is_held_copy, copies):
        alone = without(union(events.start[chosen], events.end[chosen]), rest)
        shares.append(length(alone) / trace.span_ns if trace.span_ns else 0.0)
    return shares[0], shares[1]


def _launched_at(trace, chosen: np.ndarray) -> Where:
    """The place that launched the events with most time among the chosen."""
    chosen = chosen & (trace.launch_thread >= 0)
    spent: Counter = Counter()
    places = trace.places.at(trace.launch_thread[chosen], trace.launch_start[chosen]) if chosen.any() else []
    for place, lasts in zip(places, (trace.events.end - trace.events.start)[chosen].tolist(), strict=True):
        spent[place._replace(step=None)] += lasts
    return spent.most_common(1)[0][0] if spent else Where()


def _host(trace):
    """Launches that come late: the price of launching, or other work of the host."""
    start, end = (np.array([getattr(p, key) for p in trace.gap_pieces], np.int64) for key in ("start", "end"))
    late = np.array([p.cause == gaps.HOST for p in trace.gap_pieces], bool)
    other = late & (end - start - covered(_launching(trace), start, end) >= LONG)
    launching = late & ~other
    share = (end - start)[launching].sum() / max(1, trace.span_ns)
    if share >= LEAST_TINY and launching.sum() >= LEAST_LAUNCHES:
        phases: Counter = Counter()
        for i in np.flatnonzero(launching).tolist():
            phases[trace.gaps[i].place.phase] += int(end[i] - start[i])
        where = Where(phase=phases.most_common(1)[0][0])
        median = np.median((trace.events.end - trace.events.start)[trace.events.kind == 0]) / 1e3
        launches = f"{trace.launches + trace.graph_launches:,} launches of kernels of {median:.1f} us in the median"
        busy = f"the host launches more slowly than the device works, which is busy {trace.busy_share:.0%} of the time"
        yield _timed(TINY, float(share), where, f"{launches}: {busy} and idle most {where}.")
    share = (end - start)[other].sum() / max(1, trace.span_ns)
    if share >= LEAST:
        where = costliest(trace, gaps.HOST, other)
        what = f"{_idle(share)} while the host does other work than launching, most of it"
        yield _timed(HOST, float(share), where, f"{what} {_at(where)}.")


def _launching(trace):
    """When the host is inside an operator or an optimizer: work that leads to launches."""
    operators, notes, places = trace.recording.operators, trace.recording.notes, trace.places
    threads = np.append(np.unique(trace.launch_thread), places.main)
    outer = (places.operators.parent < 0) & np.isin(operators.thread, threads)
    optimizer = np.array([name.startswith("Optimizer.") for name in trace.recording.names] or [False])[notes.name]
    starts, ends = (np.append(getattr(operators, k)[outer], getattr(notes, k)[optimizer]) for k in ("start", "end"))
    return union(starts, ends)


def _one_block(trace):
    """Kernels that are long, run alone and leave multiprocessors empty."""
    if not trace.multiprocessors:
        return
    events, lasts = trace.events, trace.events.end - trace.events.start
    chosen = trace.is_small & (lasts >= ALONE)
    share = _empty(trace, chosen) / max(1, trace.span_ns)
    if share >= LEAST_EMPTY:
        spent: Counter = Counter()
        for i in np.flatnonzero(chosen).tolist():
            spent[events.name[i], events.blocks[i]] += int(lasts[i])
        (name, blocks), _ = spent.most_common(1)[0]
        where = _launched_at(trace, chosen & (events.name == name))
        what = f"the device counts as busy {trace.busy_share:.0%} of the time, but {share:.0%} of it is empty"
        why = f"{trace.kernel(name)} has {blocks} blocks for {trace.multiprocessors} multiprocessors"
        yield _timed(ONE_BLOCK, share, where, f"{what}: {why} ({where}).")


def _empty(trace, chosen: np.ndarray) -> float:
    """Nanoseconds in which the chosen kernels run and no other, weighted by the multiprocessors without a block."""
    events, others = trace.events, (trace.events.kind == 0) & ~chosen
    times = np.append(events.start[chosen], events.end[chosen])
    order = np.argsort(times, kind="stable")
    times, blocks = times[order], np.append(events.blocks[chosen], -events.blocks[chosen])[order].cumsum()
    start, end = times[:-1], times[1:]
    alone = end - start - covered(union(events.start[others], events.end[others]), start, end)
    filled = np.minimum(blocks[:-1] / trace.multiprocessors, 1)
    return float((alone * (1 - filled))[filled > 0].sum())


def _memory(trace):
    """Memory that backward needs for a while and gives back, in the step with the highest peak."""
    peak = trace.peak
    mine = [s for s in trace.swells if peak and s.step == peak.where.step and s.peak >= peak.bytes]
    if not mine:
        return
    swell = mine[0]
    share = (swell.peak - max(swell.before, swell.after)) / swell.peak
    if share >= LEAST_SWELL:
        what = f"allocated memory is highest in step {peak.where.step}, {swell.peak / 2**20:,.0f} MiB"
        why = f"{share:.0%} of it is there neither when backward begins nor when it ends"
        yield Fault(MEMORY, share, peak.where, f"{MEMORY}: {what}, {peak.where}; {why}.", 1.0)
