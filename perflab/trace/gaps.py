"""Why a device was idle: each gap between its intervals, cut into pieces with one cause each.

The piece [a, b) of a gap is explained by the host thread that launched what ended the gap. Pieces cover the
gaps exactly, so their shares and the busy share sum to one.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import between

from .host import Where
from .read import KINDS

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

_DATA = r"(?i)dataloader|^(next|load|get|fetch)[ _]?(data|batch)|^data([ _](load|wait).*)?$"
_CALLS = {
    SYNC: r"^(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize",
    COPY: r"^(cuda|cu|hip)Memcpy",
    ALLOCATE: r"^(cuda|cu|hip)(Malloc|Free|HostAlloc|HostRegister|MemCreate|MemMap|MemRelease|MemHostAlloc)",
}


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


class HostWait(NamedTuple):
    """The host waits, in nanoseconds: for data, for the device, for a copy or for memory."""

    start: int
    end: int
    cause: str
    thread: int


class Call(NamedTuple):
    """A call of the CUDA runtime and what it is about: waiting, copying, allocating, or nothing of these ("")."""

    start: int
    end: int
    thread: int
    name: str
    kind: str
    copy: str  # the name of the copy that it started, or ""
    operator: int  # the outermost of torch's operators around it, or -1


def pieces(trace) -> Iterator[Piece]:
    """The gaps of a Trace in order, cut by their causes.

    A wait for the device or for a copy explains at most as much idle time as it held the host: first in the gap
    that it leads to, then in those after it, until the host has caught up.
    """
    waits, latency = host_waits(trace), _latency(trace)
    uncharged = {wait: wait.end - wait.start for wait in waits}
    idle_from, idle_to = between(trace.busy)
    events = np.searchsorted(trace.events.start, idle_to)
    launches = trace.launched_by[events]
    columns = (idle_from, idle_to, events, launches.start, launches.end, launches.thread)
    rows = zip(*(column.tolist() for column in columns), _near(waits, idle_from, idle_to), strict=True)
    last = None  # the wait after which the host has not caught up yet
    for start, end, event, launch, returned, thread, near in rows:
        last = next((w for w in reversed(near) if w.cause in (SYNC, COPY) and w.start < start), last)
        if thread < 0:
            yield Piece(start, end, QUEUED if trace.is_early[event] else UNKNOWN, thread, start, event)
        elif launch + latency <= start and not (trace.is_pageable[event] and returned > start):
            yield Piece(start, end, QUEUED, thread, launch, event)
            last = None
        else:
            for begin, until, wait in _cut(start, end, near):
                culprit = wait or last
                own = begin + min(until - begin, uncharged.get(culprit, 0))  # from here on the host is late by itself
                if own > begin:
                    uncharged[culprit] -= own - begin
                    middle = (culprit.start + culprit.end) // 2
                    yield Piece(begin, own, culprit.cause, culprit.thread, middle, event)
                if own < until:
                    yield Piece(own, until, HOST, thread, (min(own, launch) + min(until, launch)) // 2, event)


def _near(waits: list[HostWait], idle_from: np.ndarray, idle_to: np.ndarray) -> list[list[HostWait]]:
    """For each gap the waits that reach into it, or end just before it, in order."""
    starts = np.array([wait.start for wait in waits], np.int64)
    ends = np.maximum.accumulate(np.array([wait.end for wait in waits], np.int64)) + SKEW
    bounds = (idle_from, np.searchsorted(ends, idle_from), np.searchsorted(starts, idle_to))
    rows = zip(*(bound.tolist() for bound in bounds), strict=True)
    return [[wait for wait in waits[low:high] if wait.end + SKEW >= start] for start, low, high in rows]


def _cut(start: int, end: int, waits: list[HostWait]) -> Iterator[tuple[int, int, HostWait | None]]:
    """A gap in stretches, each with the wait that held the host, or None where it was on its own."""
    for wait in waits:
        if wait.start > start:
            yield start, wait.start, None
            start = wait.start
        if wait.end > start:
            yield start, min(wait.end, end), wait
            start = min(wait.end, end)
    if start < end:
        yield start, end, None


def _latency(trace) -> int:
    """Nanoseconds from a launch to its kernel: the least that is common in this trace."""
    known = trace.launched_by.thread >= 0
    delays = (trace.events.start - trace.launched_by.start)[known]
    return int(min(LATENCY, max(0, np.percentile(delays, 5)))) if len(delays) else LATENCY


def host_waits(trace) -> list[HostWait]:
    """When the host waited, on the main thread and those that launch, in order; enclosing before enclosed.

    A wait inside an operator of torch, such as aten::item or aten::to, is as long as the operator: without
    the wait there would be no operator.
    """
    recording, operators = trace.recording, trace.recording.operators
    threads = {trace.places.main, *trace.launched_by.thread.tolist()}
    notes = recording.notes[recording.matching(_DATA, recording.notes)].tolist()
    waits = {HostWait(start, end, DATA, thread) for start, end, _, thread, _ in notes if thread in threads}
    calls, none = _calls(trace), Call(0, 0, -1, "", "", "", -1)
    for before, call, after in zip([none, *calls], calls, [*calls[1:], none], strict=False):
        reason = cause(call, before, after)
        if reason and call.thread in threads:
            span = operators[call.operator] if call.operator >= 0 and reason != ALLOCATE else call
            waits.add(HostWait(int(span.start), int(span.end), reason, call.thread))
    return sorted(waits, key=lambda wait: (wait.start, -wait.end, wait.cause))


def cause(call: Call, before: Call, after: Call) -> str:
    """Why a call holds the host, told by the calls before and after it as well; empty where it does not.

    A copy holds the host where its memory is not pinned, or the call is not asynchronous.
    """
    if call.kind == COPY:
        holds = "Pageable" in call.copy or "Async" not in call.name
        if not holds or not re.search("HtoD|DtoH|DtoD", call.copy):
            return ""
        return COPY if "HtoD" in call.copy else SYNC
    if call.kind == SYNC and call.operator >= 0:
        if after.kind == ALLOCATE and after.operator == call.operator:
            return ""  # torch's allocator gives memory back: the next calls tell of it
        if before.kind == COPY and before.operator == call.operator and "HtoD" in before.copy:
            return COPY
    return call.kind


def _calls(trace) -> list[Call]:
    recording, nest = trace.recording, trace.places.operators
    calls = recording.calls
    kinds = np.select([recording.matching(pattern, calls) for pattern in _CALLS.values()], list(_CALLS), "")
    # autograd's nodes and compiled regions hold many operators and are none themselves
    is_aten = np.array([name.startswith("aten::") for name in nest.names])
    inner = nest.at(calls.thread, calls.start)
    operators = nest.outermost(np.where(is_aten[inner], inner, -1), is_aten)
    is_copy = trace.events.kind == KINDS.index("gpu_memcpy")
    copied = dict(zip(trace.call[is_copy].tolist(), trace.events.name[is_copy].tolist(), strict=True))
    names = [*recording.names, ""]
    columns = (calls.start, calls.end, calls.thread, calls.name, kinds, operators)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        Call(start, end, thread, names[name], kind, names[copied.get(number, -1)], operator)
        for number, (start, end, thread, name, kind, operator) in enumerate(rows)
    ]
