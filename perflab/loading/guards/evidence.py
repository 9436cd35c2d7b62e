"""What is examined, and what was seen of it: readings add to an Evidence, rules judge by it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import psutil
from torch.utils.data import DataLoader, IterableDataset

from perflab.bench import machine
from perflab.bench.settings import budget

from .digest import SOURCES
from .probe import Draws, Parts, Read, StreamRead
from .resources import Census, descriptors

MOST_WORKERS = 8  # that read on trial
FINE, ALARM, NOT_CHECKED = "fine", "ALARM", "not checked"


@dataclass(frozen=True)
class Check:
    """What one guard says: `state` is "fine", "ALARM" or "not checked" (then `what` is the reason)."""

    state: str
    what: str
    seen: str = ""
    way_out: str = ""
    guard: str = ""

    def __repr__(self):
        return f"{self.guard}: {self.state}"

    def __str__(self):
        figures = f"Seen: {self.seen}." if self.seen else ""
        return " ".join(filter(None, [f"{self.guard}: {self.state}.", self.what, figures, self.way_out]))


def fine(what: str, seen: str = "") -> Check:
    return Check(FINE, what, seen)


def alarm(what: str, seen: str, way_out: str) -> Check:
    return Check(ALARM, what, seen, way_out)


def unchecked(why: str) -> Check:
    return Check(NOT_CHECKED, why)


@dataclass
class Epoch:
    """The indices of an epoch, as the samplers of the main process give them."""

    samples: int = 0
    size: int | None = None  # of a batch
    drop_last: bool = False
    sizes: list[int] | None = None  # of each batch, where a batch sampler of the learner's makes them
    read: int = 0
    distinct: int = 0
    standard: str = ""  # the name of torch's sampler
    error: str = ""


@dataclass
class EpochChange:
    """What set_epoch changed: samples, and attributes of the objects at `paths` that have one."""

    paths: list[str]
    samples: bool
    attributes: bool
    error: str = ""


@dataclass
class WorkerRun:
    """What one epoch of DataLoader workers showed. `content`: a stream was read with the global streams alike."""

    workers: int
    content: bool = False
    compared: int = 0  # samples
    other_content: list[int] = field(default_factory=list)  # places whose sample is not the reference's
    other_form: list[int] = field(default_factory=list)
    draws: dict[int, Draws] = field(default_factory=dict)  # by worker, as those that follow
    streams: dict[int, StreamRead] = field(default_factory=dict)
    census: dict[int, list[Census]] = field(default_factory=dict)
    rereads: int = 0
    threads_running: int = 1

    @property
    def digests(self) -> np.ndarray:
        """Of all samples of a stream."""
        return np.concatenate([np.zeros(0, np.uint64), *(read.digests for read in self.streams.values())])


@dataclass
class Evidence:
    """A loader, how it is tried, and all that was seen of it."""

    loader: DataLoader
    bare: bool  # a dataset was given, without a loader
    step: Callable | None
    epochs: int
    timeout_s: float
    start: str = ""  # how workers are started here

    # of the learner's process, before anything is read
    threads: int = field(default_factory=lambda: psutil.Process().num_threads())
    descriptors: dict[int, str] = field(default_factory=descriptors)

    # read in one process, without workers
    unpicklable: list[tuple[str, str, str]] | None = None  # path, "pickle" or "main", words
    long_containers: dict[str, tuple[int, int]] = field(default_factory=dict)  # path: objects, bytes
    open_files: dict[str, int] = field(default_factory=dict)  # path: descriptor
    handles: dict[str, tuple[int, str]] = field(default_factory=dict)  # path: id, type
    devices: set[str] | None = None  # other than the CPU, of a sample
    batch_devices: set[str] = field(default_factory=set)
    default_device: str = "cpu"
    epoch: Epoch | None = None
    total: int = 0  # samples of the dataset, read or not
    keys: list = field(default_factory=list)  # that were read
    read: Read | None = None
    stream: StreamRead | None = None
    sources: tuple[str, ...] = SOURCES  # global random streams that reading moves
    own_random: bool = False  # the samples draw from generators of their own
    own_forms: bool = False  # so do their shapes and types
    by_worker: bool = False  # one worker read the reference, as a copy could not
    batch_tensors: int | None = None
    collate_error: str = ""
    unsendable: str = ""
    epoch_here: EpochChange | None = None

    # read by workers
    runs: list[WorkerRun] = field(default_factory=list)
    moved_offsets: dict[int, str] = field(default_factory=dict)  # descriptor: file
    epoch_in_workers: EpochChange | None = None
    rereadings: dict[int, tuple[int, ...]] = field(default_factory=dict)  # place: twice here, twice by a worker

    # the loader's own iteration
    fds_by_batch: list[int] = field(default_factory=list)
    tensors_by_batch: list[int] = field(default_factory=list)
    step_error: str = ""

    ended: str = ""  # why reading in workers, or at all, came to no end
    where: str = ""

    def __post_init__(self):
        loader = self.loader
        batches = loader.batch_size is not None or loader.batch_sampler is not None
        self.parts = Parts(loader.dataset, loader.collate_fn, loader.worker_init_fn, batches)
        self.method = machine.start_method(loader)  # of the loader's own workers
        self.start = "fork" if self.method == "fork" else "forkserver"
        self.trial_workers = max(2, min(loader.num_workers or 2, MOST_WORKERS))
        # Seconds of reading: where not all can be read, and where all can.
        self.partial_s, self.whole_s = (6.0, 20.0) if budget() == "full" else (0.6, 2.0)

    def learn(self, run: WorkerRun | None = None, **fields):
        """Add what a reading says."""
        if run is not None:
            self.runs.append(run)
        for name, value in fields.items():
            assert name in type(self).__dataclass_fields__, name
            setattr(self, name, value)

    @property
    def streams(self) -> bool:
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def workers(self) -> int:
        return self.loader.num_workers or self.trial_workers

    @property
    def item_s(self) -> float:
        return self.read.seconds / max(1, self.read.done) if self.read else 0.0

    @property
    def patience_s(self) -> float:
        """How long a silence is no hang: one command to a worker is some readings."""
        return max(self.timeout_s, 20 * self.item_s)

    @property
    def few(self) -> int:
        """How many samples can be read in a moment: 64, or fewer where they are slow."""
        return max(1, min(64, self.read.done, int(0.5 * self.partial_s * self.read.done / self.read.seconds)))

    @property
    def good_keys(self) -> list:
        """Those whose sample can be read."""
        return [key for place, key in enumerate(self.keys) if place not in self.read.errors]

    @property
    def content_runs(self) -> list[WorkerRun]:
        return [run for run in self.runs if run.content]
