"""The allocations in a trace: where allocated memory peaks, and how backward swells over what it begins with."""

from typing import NamedTuple

import numpy as np

from .host import NODE, Where, Whereabouts, step_number


class MemoryPeak(NamedTuple):
    """Where the device's allocated memory was highest, of the allocations that the trace has."""

    bytes: int
    time: int  # nanoseconds of the trace
    where: Where


class Swell(NamedTuple):
    """Bytes allocated when the backward pass of a step begins, at its highest, and when it ends."""

    step: int | None
    before: int
    peak: int
    after: int


def peak(places: Whereabouts, device: int) -> MemoryPeak | None:
    """None where the trace has no allocations: they need profile_memory=True."""
    mine = [event for event in places.recording.memory if event[2] == device]
    if not mine:
        return None
    time, thread, _, total = max(mine, key=lambda event: event[3])
    return MemoryPeak(total, time, places.one(thread, time))


def swells(places: Whereabouts, device: int) -> list[Swell]:
    """One for each step that has a backward pass. The pass lasts from its first autograd node to its last."""
    recording = places.recording
    mine = [event for event in recording.memory if event[2] == device]
    notes, operators, names = recording.notes, recording.operators, recording.names
    nodes = np.array([name.startswith(NODE) for name in names] or [False])
    of_backward = np.flatnonzero(nodes[operators.name]) if len(operators) else np.zeros(0, np.int64)
    if not mine or not len(of_backward) or not len(notes):
        return []
    times, totals = np.array([event[0] for event in mine]), np.array([event[3] for event in mine])
    found = []
    for i in np.flatnonzero(places.is_step[notes.name]):
        inside = of_backward[
            (operators.start[of_backward] >= notes.start[i]) & (operators.start[of_backward] < notes.end[i])
        ]
        if not len(inside):
            continue
        first, last = operators.start[inside].min(), operators.end[inside].max()
        low, high = np.searchsorted(times, first), np.searchsorted(times, last, side="right")
        if high > low:
            before = int(totals[low - 1]) if low else int(totals[low])
            number = step_number(names[notes.name[i]])
            found.append(Swell(number, before, int(totals[low:high].max()), int(totals[high - 1])))
    return found
