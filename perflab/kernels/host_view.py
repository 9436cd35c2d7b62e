"""What a trace says about the host alone: for a machine without a GPU, and for what the device waits for."""

import functools

import numpy as np
import pandas as pd

from perflab.bench.intervals import length, union

from .events import Recording, recorded
from .gaps import is_data
from .whereabouts import Whereabouts, step_number


class HostView:
    """The host's part of a trace; `host_view` makes it. Times are the host's own clock."""

    def __init__(self, recording: Recording):
        self.recording, self.places = recording, Whereabouts(recording)

    def top(self, n: int = 10) -> pd.DataFrame:
        """The n operators with the most time of their own: calls, self_s, share of all self time."""
        spans = self.recording.operators
        frame = pd.DataFrame({"name": spans.name, "self_s": self.places.operators.own_time() / 1e9})
        table = frame.groupby("name").self_s.agg(calls="size", self_s="sum")
        table["share"] = table.self_s / table.self_s.sum() if len(table) else 0.0
        table.index = pd.Index([self.recording.names[i] for i in table.index], name="operator")
        return table.sort_values("self_s", ascending=False, kind="stable").head(n)

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """By step number: time_s, and wait_s, what of it was spent waiting for the DataLoader."""
        notes, names = self.recording.notes, self.recording.names
        rows = {}
        waits = np.array([is_data(names[name]) for name in notes.name], bool)
        for i in range(len(notes)):
            if self.places.is_step[notes.name[i]]:
                a, b = notes.start[i], notes.end[i]
                wait = length(union(np.maximum(notes.start[waits], a), np.minimum(notes.end[waits], b)))
                rows[step_number(names[notes.name[i]])] = {"time_s": (b - a) / 1e9, "wait_s": wait / 1e9}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["time_s", "wait_s"]).rename_axis("step")

    @property
    def wait_share(self) -> float:
        """Share of the steps that is spent waiting for data; nan without steps."""
        return float(self.steps.wait_s.sum() / self.steps.time_s.sum()) if len(self.steps) else float("nan")


def host_view(source) -> HostView:
    """The host's part of a path (.json, .json.gz), a dict, or a finished torch profiler; errors as `trace.read`."""
    return HostView(recorded(source))
