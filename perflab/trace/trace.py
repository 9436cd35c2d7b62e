"""What a trace of torch.profiler says about a device: how busy it was, what ran, and why it was idle.

Times are kept in whole nanoseconds, and busy time is the length of the union of the device's intervals:
kernels that overlap on two streams count once.
"""

import functools
import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from perflab.bench.intervals import length, union, without
from perflab.errors import PerflabError

from . import faults, gaps, memory_events
from .host import Whereabouts, step_number
from .read import KINDS, Recording, recorded

KERNEL, COPY = KINDS.index("kernel"), KINDS.index("gpu_memcpy")
_LAUNCH = re.compile(r"^(cuda|cu|hip|hipExt)\w*Launch(Cooperative)?Kernel")
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
_COLLECTIVE = re.compile(r"^\W*(void )?(nccl|rccl|mscclpp|nvshmem)", re.IGNORECASE)
_FUNCTOR = re.compile(r"\w*(?:Functor|functor)\w*")


class Step(NamedTuple):
    """One ProfilerStep of the host, in seconds from the device's first event."""

    number: int | None
    start_s: float
    end_s: float


class Trace:
    """One device of a trace; `read_trace` makes it.

    span_s runs from the first event of the device to the end of its last one. The host's steps begin
    earlier and end earlier, as the device works behind the host.
    """

    def __init__(self, recording: Recording, device: int):
        self.recording, self.device = recording, device
        self.places = Whereabouts(recording)
        mine = recording.device.device == device
        self.events = _of_one_device(recording.device, mine)
        self._match()
        self.busy = union(self.events.start, self.events.end)
        self.origin = int(self.events.start[0])

    # -- how long, how busy

    @property
    def span_ns(self) -> int:
        return int(self.busy[1][-1] - self.busy[0][0]) if len(self.busy[0]) else 0

    @property
    def busy_ns(self) -> int:
        return length(self.busy)

    @property
    def span_s(self) -> float:
        return self.span_ns / 1e9

    @property
    def busy_s(self) -> float:
        return self.busy_ns / 1e9

    @property
    def busy_share(self) -> float:
        """Of the span; the pieces of `gaps` are the rest."""
        return self.busy_ns / self.span_ns if self.span_ns else 0.0

    @property
    def name(self) -> str:
        """Of the device, as the trace has it."""
        return str(self._property("name") or f"device {self.device}")

    @property
    def multiprocessors(self) -> int | None:
        """How many the device has; None where the trace does not say."""
        number = self._property("numSms")
        return number if isinstance(number, int) and number > 0 else None

    def _property(self, key: str):
        return self.recording.properties.get(self.device, {}).get(key)

    @functools.cached_property
    def steps(self) -> list[Step]:
        notes, names, places = self.recording.notes, self.recording.names, self.places
        chosen = [i for i in range(len(notes)) if places.is_step[notes.name[i]]]
        chosen.sort(key=lambda i: notes.start[i])
        return [
            Step(step_number(names[notes.name[i]]), self._seconds(notes.start[i]), self._seconds(notes.end[i]))
            for i in chosen
        ]

    def _seconds(self, time: int) -> float:
        return (int(time) - self.origin) / 1e9

    # -- what was launched and what ran

    def _match(self):
        """For each device event the call that launched it: its start, end and thread, or -1."""
        calls, events = self.recording.calls, self.events
        columns = ("start", "end", "thread", "correlation")
        launches = pd.DataFrame({name: getattr(calls, name) for name in columns} | {"call": np.arange(len(calls))})
        ran = pd.DataFrame({"latest": events.start + gaps.SKEW, "correlation": events.correlation})
        # where processes share a correlation, the last call before the kernel
        found = (
            pd.merge_asof(ran, launches.sort_values("start"), left_on="latest", right_on="start", by="correlation")
            .fillna(-1)
            .astype(np.int64)
        )
        found[events.correlation < 0] = -1
        self.call, self.launch_start = found["call"].to_numpy(), found["start"].to_numpy()
        self.launch_end, self.launch_thread = found["end"].to_numpy(), found["thread"].to_numpy()
        known = self.call >= 0
        self._event_of = dict(zip(self.call[known].tolist(), np.flatnonzero(known).tolist(), strict=True))
        pageable = np.array(["Pageable" in name for name in self.recording.names] or [False])
        self.is_held_copy = (events.kind == COPY) & pageable[events.name]

    def copied(self, call: int) -> str:
        """The name of the copy that a call started, such as "Memcpy HtoD (Pageable -> Device)"; empty for others."""
        event = self._event_of.get(call)
        return self.recording.names[self.events.name[event]] if event is not None else ""

    def direction(self, call: int) -> str:
        """HtoD, DtoH or DtoD of the copy that a call started; empty where the trace has none."""
        return next((d for d in ("HtoD", "DtoH", "DtoD") if d in self.copied(call)), "")

    @property
    def kernels(self) -> int:
        """Kernels that ran."""
        return int((self.events.kind == KERNEL).sum())

    @functools.cached_property
    def _launching(self) -> np.ndarray:
        """The calls that launch one kernel each, without those inside another call of the same correlation."""
        calls = self.recording.calls
        launch = gaps.matching(_LAUNCH, self.recording.names)
        chosen = np.flatnonzero(launch[calls.name]) if len(calls) else np.zeros(0, np.int64)
        _, first = np.unique(calls.correlation[chosen], return_index=True)
        return chosen[first]

    @property
    def launches(self) -> int:
        """Calls that launch one kernel each. Graph launches, copies and memsets are not among them."""
        return len(self._launching)

    @property
    def graph_launches(self) -> int:
        calls = self.recording.calls
        return int(gaps.matching(_GRAPH_LAUNCH, self.recording.names)[calls.name].sum()) if len(calls) else 0

    @functools.cached_property
    def lost(self) -> int:
        """Launches whose kernel is on no device of the trace: the profiler dropped it, and busy time is missing."""
        ran = self.recording.device.correlation
        return int((~np.isin(self.recording.calls.correlation[self._launching], ran)).sum())

    @functools.cached_property
    def is_early(self) -> np.ndarray:
        """Per device event: it was launched before the recording began, by a number below those of all its calls."""
        numbers = self.recording.calls.correlation
        first = numbers[numbers >= 0].min() if (numbers >= 0).any() else np.iinfo(np.int64).max
        return (self.call < 0) & (self.events.correlation < first)

    def kernel(self, name: int) -> str:
        """The short name of a kernel or copy, by its number in the recording."""
        return short(self.recording.names[name])

    def top(self, n: int = 10) -> pd.DataFrame:
        """The n kernels and copies with the most device time: calls, time_s, share of all of them, median_s, blocks.

        A kernel has no children, so its time is its own. `blocks` is the least grid among the calls.
        """
        return self._table(np.ones(len(self.events), bool)).head(n)

    @functools.cached_property
    def is_small(self) -> np.ndarray:
        """Per device event: a kernel whose blocks leave at least half of the multiprocessors empty.

        The large products of cuBLAS and cuDNN take 120 to 132 blocks for 132 multiprocessors: they fill it. Those
        of NCCL take few on purpose: they wait for other devices, and leave the rest to the work beside them.
        """
        blocks, several = self.events.blocks, self.multiprocessors
        if several is None:
            return np.zeros(len(blocks), bool)
        small = (self.events.kind == KERNEL) & (blocks >= 0) & (2 * blocks <= several)
        return small & ~gaps.matching(_COLLECTIVE, self.recording.names)[self.events.name]

    @property
    def small(self) -> pd.DataFrame:
        """As `top`, of the kernels that are too small to fill the device (`is_small`)."""
        return self._table(self.is_small)

    @property
    def small_share(self) -> float:
        """Share of the busy time in which nothing but such kernels ran."""
        rest = union(self.events.start[~self.is_small], self.events.end[~self.is_small])
        return length(without(self.busy, rest)) / self.busy_ns if self.busy_ns else 0.0

    def _table(self, chosen: np.ndarray) -> pd.DataFrame:
        events, lasts = self.events, (self.events.end - self.events.start) / 1e9
        frame = pd.DataFrame({"name": events.name, "time_s": lasts, "blocks": events.blocks})[chosen]
        groups = frame.groupby("name")
        table = groups.agg(calls=("time_s", "size"), time_s=("time_s", "sum"), blocks=("blocks", "min"))
        table["median_s"] = groups.time_s.median()
        table["share"] = table.time_s / lasts.sum() if lasts.sum() else 0.0
        table.index = pd.Index([self.kernel(i) for i in table.index], name="kernel")
        table = table.sort_values("time_s", ascending=False, kind="stable")
        return table[["calls", "time_s", "share", "median_s", "blocks"]]

    # -- why it was idle

    @functools.cached_property
    def gap_pieces(self) -> list[gaps.Piece]:
        return gaps.pieces(self)

    @functools.cached_property
    def gaps(self) -> list[gaps.Gap]:
        """Each stretch without work, with one cause and the place of it; together they are span_s - busy_s."""
        found = self.gap_pieces
        threads, times = (np.array([getattr(p, key) for p in found], np.int64) for key in ("thread", "time"))
        places = self.places.at(threads, times) if found else []
        return [
            gaps.Gap(
                self._seconds(p.start), self._seconds(p.end), p.cause, place, self.kernel(self.events.name[p.event])
            )
            for p, place in zip(found, places, strict=True)
        ]

    @functools.cached_property
    def idle(self) -> dict[str, float]:
        """Share of the span by cause, the largest first. With busy_share it sums to one."""
        sums: dict[str, int] = {}
        for piece in self.gap_pieces:
            sums[piece.cause] = sums.get(piece.cause, 0) + piece.end - piece.start
        return {cause: ns / self.span_ns for cause, ns in sorted(sums.items(), key=lambda item: -item[1])}

    # -- memory, findings

    @functools.cached_property
    def peak(self) -> memory_events.MemoryPeak | None:
        """Where allocated memory was highest; None without profile_memory=True."""
        return memory_events.peak(self.places, self.device)

    @functools.cached_property
    def swells(self) -> list[memory_events.Swell]:
        """For each step with a backward pass: bytes allocated before, at its highest, and after."""
        return memory_events.swells(self.places, self.device)

    @functools.cached_property
    def findings(self) -> list["faults.Fault"]:
        """What is wrong, the largest share first; empty for a device that is kept busy."""
        return faults.findings(self)

    @property
    def doubts(self) -> list[str]:
        """Why the figures of this trace may be off, a sentence each; empty for a whole one."""
        found = []
        if self.lost:
            found.append(
                f"{self.lost:,} of {self.launches:,} launches have no kernel in the trace: the profiler lost them, "
                "and the device was busier than it says. Profile again, with fewer steps or a newer driver."
            )
        if (share := self.idle.get(gaps.UNKNOWN, 0)) >= 0.01:
            found.append(f"{share:.0%} of the time is a gap before a kernel whose launch the trace does not have.")
        return found

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} steps, " if self.steps else ""
        line = f"Trace of {self.name}: {steps}{self.kernels:,} kernels, {self.launches:,} launches"
        return "\n".join([line, *self.doubts])


def read_trace(source, device: int | None = None) -> Trace:
    """The trace of one device from a path (.json, .json.gz), a dict, or a finished torch profiler.

    device: its number; without, the one with most work. Raises PerflabError, one sentence, for what is no
    trace, cut short, empty, or has no work of a device.

    >>> read_trace("trace.json.gz")  # doctest: +SKIP
    """
    recording = recorded(source)
    numbers = np.unique(recording.device.device)
    if not len(numbers):
        raise PerflabError(
            f"0 kernels recorded: {recording.source} has {recording.events:,} events, and none of a device. Profile "
            "with ProfilerActivity.CUDA on a machine with CUDA (under WSL the driver may give none), or look at "
            "the host's part alone: prof.key_averages(), or the file in https://ui.perfetto.dev."
        )
    if device is None:
        spent = recording.device.end - recording.device.start
        device = int(max(numbers, key=lambda d: spent[recording.device.device == d].sum()))
    elif not isinstance(device, int) or device not in numbers:
        raise PerflabError(
            f"{recording.source} has no work of device {device!r}: it has device {', '.join(map(str, numbers))}."
        )
    return Trace(recording, device)


def _of_one_device(events, mine: np.ndarray):
    """A copy of the device's columns in order of start."""
    order = np.flatnonzero(mine)
    order = order[np.argsort(events.start[order], kind="stable")]
    part = object.__new__(type(events))
    for column in events.COLUMNS:
        setattr(part, column, getattr(events, column)[order])
    return part


def short(name: str) -> str:
    """A kernel's name without its namespaces, its arguments and most of its template: `kernel<Functor>`."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    head, _, rest = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("<")
    base = head.partition("(")[0].rpartition("::")[2] or name
    functor = _FUNCTOR.search(rest)
    return f"{base}<{functor.group()}>" if functor else base
