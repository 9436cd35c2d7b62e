"""What a trace of torch.profiler says about a device: how busy it was, what ran, and why it was idle.

Times are kept in whole nanoseconds, and busy time is the length of the union of the device's intervals:
kernels that overlap on two streams count once.
"""

import functools
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import pandas as pd

from perflab.bench.intervals import Intervals, length, union, without
from perflab.errors import PerflabError

from . import faults, gaps
from .host import Where, Whereabouts, step_number
from .read import KINDS, Recording, recorded

KERNEL, COPY = KINDS.index("kernel"), KINDS.index("gpu_memcpy")
_LAUNCH = r"^(cuda|cu|hip|hipExt)\w*Launch(Cooperative)?Kernel"
_GRAPH_LAUNCH = r"^(cuda|cu|hip)GraphLaunch"
_COLLECTIVE = r"(?i)^\W*(void )?(nccl|rccl|mscclpp|nvshmem)"
_FUNCTOR = re.compile(r"\w*(?:Functor|functor)\w*")


class Step(NamedTuple):
    """One ProfilerStep of the host, in seconds from the device's first event."""

    number: int | None
    start_s: float
    end_s: float


class MemoryPeak(NamedTuple):
    """Where the device's allocated memory was highest, of the allocations that the trace has."""

    bytes: int
    time: int  # nanoseconds of the trace
    where: Where


class Trace:
    """One device of a trace; `read_trace` makes it.

    span_ns, span_s: from the first event of the device to the end of its last one. The host's steps begin
        earlier and end earlier, as the device works behind the host.
    busy_ns, busy_share: time in which something ran, and its share of the span. The gaps are the rest.
    kernels: how many ran. launches: calls that launch one kernel each, without graph launches, copies and memsets.
    dropped_kernels: launches whose kernel is on no device of the trace: the profiler dropped it.
    multiprocessors: how many the device has; None where the trace does not say.
    """

    def __init__(self, recording: Recording, device: int):
        self.recording, self.device = recording, device
        self.places = Whereabouts(recording)
        properties = recording.properties.get(device, {})
        self.name = str(properties.get("name") or f"device {device}")
        multiprocessors = properties.get("numSms")
        self.multiprocessors = multiprocessors if isinstance(multiprocessors, int) else None

        events = recording.device[recording.device.gpu == device]
        self.events = events[np.argsort(events.start, kind="stable")]
        self.durations = self.events.end - self.events.start
        self.origin = int(self.events.start[0])
        self.busy = union(self.events.start, self.events.end)
        self.busy_ns = length(self.busy)
        self.span_ns = int(self.busy[1][-1] - self.busy[0][0]) if self.busy_ns else 0
        self.span_s = self.span_ns / 1e9
        self.busy_share = self.busy_ns / self.span_ns if self.span_ns else 0.0

        calls = recording.calls
        launches = calls.correlation[recording.matching(_LAUNCH, calls)]
        launches = np.unique(launches)  # one call may be inside another of the same correlation
        self.launches = len(launches)
        self.graph_launches = int(recording.matching(_GRAPH_LAUNCH, calls).sum())
        self.kernels = int((self.events.kind == KERNEL).sum())
        self.dropped_kernels = int((~np.isin(launches, recording.device.correlation)).sum())

    @functools.cached_property
    def steps(self) -> list[Step]:
        steps = self.places.steps
        return [
            Step(step_number(name), self._seconds(span.start), self._seconds(span.end))
            for name, span in zip(steps.names, steps.spans, strict=False)
        ]

    def _seconds(self, time: int) -> float:
        return (int(time) - self.origin) / 1e9

    # -- what was launched and what ran

    @functools.cached_property
    def call(self) -> np.ndarray:
        """For each device event the number of the call that launched it, -1 where the trace has none."""
        calls, events = self.recording.calls, self.events
        launches = pd.DataFrame({"time": calls.start, "correlation": calls.correlation, "call": np.arange(len(calls))})
        ran = pd.DataFrame({"time": events.start + gaps.SKEW, "correlation": events.correlation})
        # where processes share a correlation, the last call before the kernel
        latest = pd.merge_asof(ran, launches.sort_values("time"), on="time", by="correlation")
        return np.where(events.correlation < 0, -1, latest["call"].fillna(-1).astype(np.int64))

    @functools.cached_property
    def launched_by(self) -> np.recarray:
        """For each device event the call that launched it, with its start, end and thread; all -1 where none is."""
        calls = self.recording.calls
        none = np.full(1, -1, calls.dtype)
        return np.append(calls, none)[self.call].view(np.recarray)

    @functools.cached_property
    def is_pageable(self) -> np.ndarray:
        """Per device event: a copy from or to memory that is not pinned."""
        return (self.events.kind == COPY) & self.recording.matching("Pageable", self.events)

    @functools.cached_property
    def is_early(self) -> np.ndarray:
        """Per device event: it was launched before the recording began, by a number below those of all its calls."""
        numbers = self.recording.calls.correlation
        first = numbers[numbers >= 0].min(initial=np.iinfo(np.int64).max)
        return (self.call < 0) & (self.events.correlation < first)

    def kernel(self, name: int) -> str:
        """The short name of a kernel or copy, by its number in the recording."""
        return short(self.recording.names[name])

    def top(self, n: int = 10) -> pd.DataFrame:
        """The n kernels and copies with the most device time: calls, time_s, share of all of them, median_s, blocks.

        A kernel has no children, so its time is its own. `blocks` is the least grid among the calls.
        """
        times = self.durations / 1e9
        groups = pd.DataFrame({"name": self.events.name, "time_s": times, "blocks": self.events.blocks}).groupby("name")
        table = groups.agg(
            calls=("time_s", "size"),
            time_s=("time_s", "sum"),
            share=("time_s", "sum"),
            median_s=("time_s", "median"),
            blocks=("blocks", "min"),
        )
        table["share"] /= times.sum() or 1.0
        table.index = pd.Index([self.kernel(i) for i in table.index], name="kernel")
        return table.sort_values("time_s", ascending=False, kind="stable").head(n)

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
        return small & ~self.recording.matching(_COLLECTIVE, self.events)

    @property
    def small_share(self) -> float:
        """Share of the busy time in which nothing but such kernels ran."""
        return self.alone_ns(self.is_small, ~self.is_small) / self.busy_ns if self.busy_ns else 0.0

    def busy_with(self, chosen: np.ndarray) -> Intervals:
        """When some of the chosen events run, in nanoseconds."""
        return union(self.events.start[chosen], self.events.end[chosen])

    def alone_ns(self, chosen: np.ndarray, others: np.ndarray) -> int:
        """Nanoseconds in which some of the chosen events run, and none of the others."""
        return length(without(self.busy_with(chosen), self.busy_with(others)))

    # -- why it was idle

    @functools.cached_property
    def gap_pieces(self) -> list[gaps.Piece]:
        return list(gaps.pieces(self))

    @functools.cached_property
    def gaps(self) -> list[gaps.Gap]:
        """Each stretch without work, with one cause and the place of it; together they are what is not busy."""
        pieces = self.gap_pieces
        columns = ([getattr(piece, column) for piece in pieces] for column in ("thread", "time", "event"))
        threads, times, events = (np.array(column, np.int64) for column in columns)
        ended_by = map(self.kernel, self.events.name[events])
        return [
            gaps.Gap(self._seconds(piece.start), self._seconds(piece.end), piece.cause, place, kernel)
            for piece, place, kernel in zip(pieces, self.places.at(threads, times), ended_by, strict=True)
        ]

    @functools.cached_property
    def idle(self) -> dict[str, float]:
        """Share of the span by cause, the largest first. With busy_share it sums to one."""
        lengths: Counter[str] = Counter()
        for piece in self.gap_pieces:
            lengths[piece.cause] += piece.end - piece.start
        return {cause: ns / self.span_ns for cause, ns in lengths.most_common()}

    # -- memory, findings

    @functools.cached_property
    def allocations(self) -> np.recarray:
        """time (ns) and total (bytes) whenever the device's allocated memory changed; empty without profile_memory."""
        memory = self.recording.memory
        return memory[memory.gpu == self.device]

    @functools.cached_property
    def peak(self) -> MemoryPeak | None:
        """Where allocated memory was highest; None without profile_memory=True."""
        if not len(self.allocations):
            return None
        highest = self.allocations[[self.allocations.total.argmax()]]
        [where] = self.places.at(highest.thread, highest.time)
        return MemoryPeak(int(highest.total[0]), int(highest.time[0]), where)

    @functools.cached_property
    def findings(self) -> list["faults.Fault"]:
        """What is wrong, the largest share first; empty for a device that is kept busy."""
        return faults.findings(self)

    @property
    def warnings(self) -> list[str]:
        """Why the figures of this trace may be off, a sentence each; empty for a whole one."""
        sentences = []
        if self.dropped_kernels:
            sentences.append(
                f"{self.dropped_kernels:,} of {self.launches:,} launches have no kernel in the trace: the profiler "
                "lost them, and the device was busier than it says. Profile again, with fewer steps or a newer driver."
            )
        if (share := self.idle.get(gaps.UNKNOWN, 0)) >= 0.01:
            sentences.append(f"{share:.0%} of the time is a gap before a kernel whose launch the trace does not have.")
        return sentences

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} steps, " if self.steps else ""
        line = f"Trace of {self.name}: {steps}{self.kernels:,} kernels, {self.launches:,} launches"
        return "\n".join([line, *self.warnings])


def read_trace(source, device: int | None = None) -> Trace:
    """The trace of one device from a path (.json, .json.gz), a dict, or a finished torch profiler.

    device: its number; without, the one with most work. Raises PerflabError, one sentence, for what is no
    trace, cut short, empty, or has no work of a device.

    >>> read_trace("trace.json.gz")  # doctest: +SKIP
    """
    recording = recorded(source)
    gpus = np.unique(recording.device.gpu)
    if not len(gpus):
        raise PerflabError(
            f"0 kernels recorded: {recording.source} has {recording.events:,} events, and none of a device. Profile "
            "with ProfilerActivity.CUDA on a machine with CUDA (under WSL the driver may give none), or look at "
            "the host's part alone: prof.key_averages(), or the file in https://ui.perfetto.dev."
        )
    if device is None:
        work = recording.device.end - recording.device.start
        device = int(max(gpus, key=lambda gpu: work[recording.device.gpu == gpu].sum()))
    elif not isinstance(device, int) or device not in gpus:
        raise PerflabError(
            f"{recording.source} has no work of device {device!r}: it has device {', '.join(map(str, gpus))}."
        )
    return Trace(recording, device)


def short(name: str) -> str:
    """A kernel's name without its namespaces, its arguments and most of its template: `kernel<Functor>`."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    head, _, rest = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("<")
    base = head.partition("(")[0].rpartition("::")[2] or name
    functor = _FUNCTOR.search(rest)
    return f"{base}<{functor.group()}>" if functor else base
