"""Why a device was idle: each gap between its intervals, cut into pieces with one cause each.

The piece [a, b) of a gap is explained by the host thread that launched what ended the gap. Pieces cover the
gaps exactly, so their shares and the busy share sum to one.
"""

import re
from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import between

from .host import Where

HOST = "host busy"  # the launch came late: the host was issuing other operators, or Python
SYNC = "synchronise"  # the host waited for the device, and the device then for the host
DATA = "waiting for data"  # the host waited for the DataLoader
COPY = "copy"  # the host was held by a copy to the device
ALLOCATE = "allocating memory"  # the host was inside cudaMalloc, cudaFree or cudaHostAlloc
QUEUED = "between kernels"  # launched in time: the device changed kernels, or waited for another stream
UNKNOWN = "unknown"  # the launch is not in the trace, though it was made while it was recorded
CAUSES = (HOST, SYNC, DATA, COPY, ALLOCATE, QUEUED, UNKNOWN)

LATENCY = 10_000
"""Nanoseconds from a launch to its kernel on an idle device, at most. The trace's own is taken where it is
shorter: an H200 takes about 4 to 8 us, and more than 10 us is a queue and no latency."""

SKEW = 5_000
"""Nanoseconds by which CUPTI's clocks of host and device may differ in a trace."""

_DATA = re.compile(r"dataloader|^(next|load|get|fetch)[ _]?(data|batch)|^data([ _](load|wait).*)?$", re.IGNORECASE)
_SYNC = re.compile(r"^(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize")
_COPY = re.compile(r"^(cuda|cu|hip)Memcpy")
_ALLOCATE = re.compile(r"^(cuda|cu|hip)(Malloc|Free|HostAlloc|HostRegister|MemCreate|MemMap|MemRelease|MemHostAlloc)")
_RULES = {ALLOCATE: _ALLOCATE, COPY: _COPY, SYNC: _SYNC}


class Gap(NamedTuple):
    """A stretch in which the device did nothing, for one cause. Seconds from the device's first event."""

    start_s: float
    end_s: float
    cause: str
    place: Where
    before: str  # the kernel or copy that ended it

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


class Piece(NamedTuple):
    """A gap in whole nanoseconds; thread and time say where the host is looked up, event ends the gap."""

    start: int
    end: int
    cause: str
    thread: int
    time: int
    event: int


class Held(NamedTuple):
    """The host waits: for data, for the device, for a copy or for memory."""

    start: int
    end: int
    cause: str
    thread: int


def pieces(trace) -> list[Piece]:
    """The gaps of a Trace in order. A wait for the device is charged with the gap that it leads to, and with
    those after it while the host catches up, in all with no more than the time that it held the host: so
    much earlier would the launches have come without it."""
    waiting, late = _Waiting(held(trace)), _latency(trace)
    found: list[Piece] = []
    idle_from, idle_to = between(trace.busy)
    enders = np.searchsorted(trace.events.start, idle_to, side="left")
    columns = (trace.launch_start[enders], trace.launch_end[enders], trace.launch_thread[enders])
    rows = zip(idle_from.tolist(), idle_to.tolist(), enders.tolist(), *(c.tolist() for c in columns), strict=True)
    for a, b, event, launched, returned, thread in rows:
        around = waiting.around(a, b)
        staged = trace.is_held_copy[event] and returned > a
        if thread < 0:
            cause = QUEUED if trace.is_early[event] else UNKNOWN
            found.append(Piece(a, b, cause, -1, a, event))
        elif launched + late <= a and not staged:
            found.append(Piece(a, b, QUEUED, thread, launched, event))
            waiting.credit = 0
        else:
            found += _explained(a, b, event, launched, thread, around, waiting)
    return found


def _explained(a: int, b: int, event: int, launched: int, thread: int, around: list, waiting: "_Waiting"):
    cursor = a
    for start, end, hold in [*((h.start, min(h.end, b), h) for h in around), (b, b, None)]:
        if start > cursor:  # the host was on its own
            if charged := min(waiting.credit, start - cursor):
                yield Piece(cursor, cursor + charged, waiting.creditor.cause, *_moment(waiting.creditor), event)
                waiting.credit -= charged
                waiting.pay(waiting.creditor, charged)
                cursor += charged
            if start > cursor:
                before = min(start, launched)
                yield Piece(cursor, start, HOST, thread, (cursor + before) // 2 if before > cursor else launched, event)
                cursor = start
        if hold is not None and end > cursor:
            yield Piece(cursor, end, hold.cause, *_moment(hold), event)
            waiting.pay(hold, end - cursor)
            cursor = end


class _Waiting:
    """The holds around one gap after another, and how much of the last wait is not yet charged to a gap."""

    def __init__(self, holds: list[Held]):
        self.holds, self.next, self.active = holds, 0, []
        self.credit, self.creditor = 0, None
        self.paid: dict[Held, int] = {}

    def around(self, a: int, b: int) -> list[Held]:
        while self.next < len(self.holds) and self.holds[self.next].start < b:
            self.active.append(self.holds[self.next])
            self.next += 1
        self.active = [hold for hold in self.active if hold.end + SKEW >= a]
        for hold in self.active:
            if hold.cause in (SYNC, COPY) and hold.start < a:
                owed = min(a, hold.end) - hold.start - self.paid.get(hold, 0)
                self.credit, self.creditor = max(0, owed), hold
        return [hold for hold in self.active if hold.end > a]

    def pay(self, hold: Held, charged: int):
        self.paid[hold] = self.paid.get(hold, 0) + charged


def _moment(hold: Held) -> tuple[int, int]:
    return hold.thread, (hold.start + hold.end) // 2


def _latency(trace) -> int:
    """Nanoseconds from a launch to its kernel: the least that is common in this trace."""
    known = trace.launch_thread >= 0
    waits = (trace.events.start - trace.launch_start)[known]
    return int(min(LATENCY, max(0, np.percentile(waits, 5)))) if len(waits) else LATENCY


def held(trace) -> list[Held]:
    """When the host waited, on the main thread and those that launch, in order; enclosing before enclosed.

    A wait inside an operator of torch, such as aten::item or aten::to, is as long as the operator: without
    the wait there would be no operator.
    """
    recording, places = trace.recording, trace.places
    names, calls, notes = recording.names, recording.calls, recording.notes
    threads = {places.main, *np.unique(trace.launch_thread[trace.launch_thread >= 0]).tolist()}
    found = {
        Held(int(notes.start[i]), int(notes.end[i]), DATA, int(notes.thread[i]))
        for i in np.flatnonzero(matching(_DATA, names)[notes.name] if len(notes) else [])
        if int(notes.thread[i]) in threads
    }
    if len(calls):
        kinds = {cause: matching(rule, names)[calls.name] for cause, rule in _RULES.items()}
        operator = _operators(trace)
        for i in np.flatnonzero(np.logical_or.reduce(list(kinds.values()))).tolist():
            thread = int(calls.thread[i])
            if thread not in threads:
                continue
            cause = ALLOCATE
            if kinds[COPY][i]:
                cause = _copying(trace, i)
            elif kinds[SYNC][i]:
                if i + 1 < len(calls) and kinds[ALLOCATE][i + 1] and 0 <= operator[i] == operator[i + 1]:
                    continue  # torch's allocator gives memory back: the next calls tell of it
                after_copy = i > 0 and kinds[COPY][i - 1] and operator[i] >= 0 and operator[i] == operator[i - 1]
                cause = COPY if after_copy and trace.direction(i - 1) == "HtoD" else SYNC
            if not cause:
                continue
            if operator[i] >= 0 and cause != ALLOCATE:
                around = recording.operators
                found.add(Held(int(around.start[operator[i]]), int(around.end[operator[i]]), cause, thread))
            else:
                found.add(Held(int(calls.start[i]), int(calls.end[i]), cause, thread))
    return sorted(found, key=lambda h: (h.start, -h.end))


def _copying(trace, call: int) -> str:
    """Why a copy holds the host, if it does: memory that is not pinned, or a call that is not asynchronous."""
    direction = trace.direction(call)
    name = trace.recording.names[trace.recording.calls.name[call]]
    if direction and ("Pageable" in trace.copied(call) or "Async" not in name):
        return COPY if direction == "HtoD" else SYNC
    return ""


def _operators(trace) -> np.ndarray:
    """For each call the outermost of torch's own operators around it, -1 outside of them.

    Autograd's nodes and compiled regions hold many operators and are none themselves.
    """
    calls, nest = trace.recording.calls, trace.places.operators
    found = np.full(len(calls), -1)
    for thread in np.unique(calls.thread):
        mine = calls.thread == thread
        found[mine] = nest.at(int(thread), calls.start[mine])
    if not len(nest.spans):
        return found
    aten = np.array([name.startswith("aten::") for name in trace.recording.names])[nest.spans.name]
    found = np.where((found >= 0) & aten[found], found, -1)
    while (up := (found >= 0) & (nest.parent[found] >= 0) & aten[nest.parent[found]]).any():
        found = np.where(up, nest.parent[found], found)
    return found


def matching(rule: re.Pattern, names: list[str]) -> np.ndarray:
    return np.array([bool(rule.search(name)) for name in names] or [False])
