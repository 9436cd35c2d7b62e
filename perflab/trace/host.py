"""Where the host was at a moment of a trace: the step, the annotation, the operator, the user's own function."""

from typing import NamedTuple

import numpy as np

from perflab.bench.intervals import parents

from .read import Recording

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
    """Host events of one kind, each with the one that encloses it in its thread.

    All threads lie on one line, one after another, so that one search finds the event around a moment of any
    thread. Event -1 stands for none: it never ends, has no parent, and its name is empty.
    """

    def __init__(self, spans: np.recarray, names: list[str]):
        self.spans = spans
        self.names = [*(names[i] for i in spans.name), ""]
        self.first, self.last = (spans.start.min(), spans.end.max()) if len(spans) else (0, 0)
        self.start, end = self._on_line(spans.thread, spans.start), self._on_line(spans.thread, spans.end)
        self.parent = np.append(parents(self.start, end), -1)
        self.end = np.append(end, np.iinfo(np.int64).max)

    def _on_line(self, threads: np.ndarray, times: np.ndarray) -> np.ndarray:
        per_thread = self.last - self.first + 2
        return threads * per_thread + np.clip(times - self.first + 1, 0, per_thread - 1)

    def at(self, threads: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Index of the innermost event around each moment of a thread; -1 where there is none."""
        moments = self._on_line(threads, times)
        inner = np.searchsorted(self.start, moments, side="right") - 1
        while (over := self.end[inner] <= moments).any():
            inner = np.where(over, self.parent[inner], inner)
        return inner

    def outermost(self, inner: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
        """The events around these that no other encloses, or no other of those that are counted."""
        counted = np.ones(len(self.parent), bool) if counted is None else counted
        while (up := (self.parent[inner] >= 0) & counted[self.parent[inner]]).any():
            inner = np.where(up, self.parent[inner], inner)
        return inner


class Whereabouts:
    """The places of a recording. `main` is the thread of the steps, or else the one with most annotations or calls."""

    def __init__(self, recording: Recording):
        notes, operators, frames = recording.notes, recording.operators, recording.frames
        steps = notes[recording.matching(f"^{STEP}", notes)]
        candidates = (steps.thread, notes.thread, recording.calls.thread, operators.thread)
        self.main = next((int(np.bincount(threads).argmax()) for threads in candidates if len(threads)), -1)
        steps = steps[np.argsort(steps.start, kind="stable")]
        steps.thread = self.main  # a step holds for all threads
        tables = (steps, notes, operators, frames)
        self.steps, self.notes, self.operators, self.frames = (Nest(table, recording.names) for table in tables)

    def at(self, threads: np.ndarray, times: np.ndarray) -> list[Where]:
        """The place of each moment. What the thread itself does not say is asked of the main thread."""
        nests = (self.steps, self.notes, self.operators, self.frames)
        steps, notes, operators, frames = (self._around(nest, threads, times) for nest in nests)
        operators = self.operators.outermost(operators)
        return [
            Where(
                step_number(self.steps.names[step]),
                self._phase(note),
                self.operators.names[operator].removeprefix(NODE),
                self.frames.names[frame],
            )
            for step, note, operator, frame in zip(steps, notes, operators, frames, strict=True)
        ]

    def _around(self, nest: Nest, threads: np.ndarray, times: np.ndarray) -> np.ndarray:
        inner = nest.at(threads, times)
        return np.where(inner >= 0, inner, nest.at(np.full(len(times), self.main), times))

    def _phase(self, note: int) -> str:
        """The innermost annotation, without the steps; torch's own only where the user has none around it."""
        innermost = ""
        while note >= 0 and not self.notes.names[note].startswith(STEP):
            name = self.notes.names[note]
            if not name.startswith(WRAPPERS):
                return name
            innermost = innermost or name
            note = self.notes.parent[note]
        return innermost


def step_number(name: str) -> int | None:
    """Of a ProfilerStep; None where the name is another."""
    number = name.removeprefix(STEP)
    return int(number) if number.isdecimal() and len(number) < 19 else None
