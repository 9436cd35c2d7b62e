"""Where the host was at a moment of a trace: the step, the annotation, the operator, the user's own function."""

import itertools
from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import parents

from .read import Recording, Spans

STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "  # before the name of a backward node
WRAPPERS = ("Optimizer.", "enumerate(DataLoader)")  # torch's own annotations, inside the user's where there are such


class Where(NamedTuple):
    """A moment of the host. Each part is empty, or step None, where the trace does not say."""

    step: int | None = None
    phase: str = ""
    operator: str = ""
    frame: str = ""

    def __str__(self) -> str:
        inside = [f"in {self.phase}"] if self.phase else []
        return ", ".join(part for part in (self.operator, *inside, self.frame) if part) or "outside of any annotation"


class Nest:
    """Host events of one kind, thread by thread, each with the one that encloses it."""

    def __init__(self, spans: Spans):
        self.spans = spans
        self.parent = np.full(len(spans), -1, np.int64)
        self.slices: dict[int, tuple[int, int]] = {}
        edges = np.flatnonzero(np.diff(spans.thread, prepend=-1, append=-1)) if len(spans) else []
        for low, high in itertools.pairwise(edges):
            inner = parents(spans.start[low:high], spans.end[low:high])
            self.parent[low:high] = np.where(inner >= 0, inner + low, -1)
            self.slices[int(spans.thread[low])] = int(low), int(high)

    def at(self, thread: int, times: np.ndarray) -> np.ndarray:
        """Index of the innermost event of the thread around each moment; -1 where there is none."""
        if thread not in self.slices:
            return np.full(len(times), -1)
        low, high = self.slices[thread]
        found = np.searchsorted(self.spans.start[low:high], times, side="right") - 1
        found = np.where(found >= 0, found + low, -1)
        while (over := (found >= 0) & (self.spans.end[found] <= times)).any():
            found = np.where(over, self.parent[found], found)
        return found

    def outermost(self, found: np.ndarray) -> np.ndarray:
        """The events around these that no other encloses."""
        while len(self.spans) and (up := (found >= 0) & (self.parent[found] >= 0)).any():
            found = np.where(up, self.parent[found], found)
        return found


class Whereabouts:
    """The places of a recording. `main` is the thread of the steps, or else the one with most annotations or calls."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.notes, self.operators, self.frames = map(Nest, (recording.notes, recording.operators, recording.frames))
        self.is_step = np.array([name.startswith(STEP) for name in recording.names] or [False])
        self.main = self._main()

    def _main(self) -> int:
        notes = self.recording.notes
        steps = notes.thread[self.is_step[notes.name]] if len(notes) else notes.thread
        for threads in (steps, notes.thread, self.recording.calls.thread, self.recording.operators.thread):
            if len(threads):
                return int(np.bincount(threads).argmax())
        return -1

    def at(self, threads: np.ndarray, times: np.ndarray) -> list[Where]:
        """The place of each moment. What the thread itself does not say is asked of the main thread."""
        found = {kind: np.full(len(times), -1) for kind in ("notes", "operators", "frames")}
        for kind, indices in found.items():
            nest = getattr(self, kind)
            for thread in np.unique(threads):
                mine = threads == thread
                indices[mine] = nest.at(int(thread), times[mine])
            nowhere = (indices < 0) & (threads != self.main)
            indices[nowhere] = nest.at(self.main, times[nowhere])
        operators = self.operators.outermost(found["operators"])
        name = self.recording.names.__getitem__
        texts = [
            [name(spans.name[i]).removeprefix(NODE) if i >= 0 else "" for i in indices]
            for spans, indices in ((self.operators.spans, operators), (self.frames.spans, found["frames"]))
        ]
        steps = self._steps(times)
        phases = [self._phase(i) for i in found["notes"]]
        return [Where(*parts) for parts in zip(steps, phases, *texts, strict=True)]

    def one(self, thread: int, time: int) -> Where:
        return self.at(np.array([thread]), np.array([time]))[0]

    def _steps(self, times: np.ndarray) -> list[int | None]:
        notes = self.recording.notes
        chosen = np.flatnonzero(self.is_step[notes.name]) if len(notes) else []
        if not len(chosen):
            return [None] * len(times)
        order = chosen[np.argsort(notes.start[chosen])]
        i = np.searchsorted(notes.start[order], times, side="right") - 1
        inside = (i >= 0) & (times < notes.end[order[i]])
        numbers = [step_number(self.recording.names[name]) for name in notes.name[order]]
        return [numbers[k] if ok else None for k, ok in zip(i, inside, strict=True)]

    def _phase(self, i: int) -> str:
        """The innermost annotation, without the steps; torch's own only where the user has none around it."""
        names, notes = self.recording.names, self.recording.notes
        innermost = ""
        while i >= 0 and not self.is_step[notes.name[i]]:
            name = names[notes.name[i]]
            if not name.startswith(WRAPPERS):
                return name
            innermost, i = innermost or name, self.notes.parent[i]
        return innermost


def step_number(name: str) -> int | None:
    digits = name.removeprefix(STEP)
    return int(digits) if digits.isdecimal() and len(digits) < 19 else None
