"""What a DataLoader keeps in flight: batches counted, bytes predicted and seen, and whether they fit.

Workers started by spawn or forkserver import this file: nothing that draws or teaches may enter.
"""

import contextlib
import io
import itertools
import mmap
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from perflab.bench import cleanup, interrupt, machine
from perflab.bench.fork import value_of_fork
from perflab.bench.units import quantity
from perflab.errors import PerflabError, first_line

from .rebuild import rebuilt

SHM = Path("/dev/shm")


# -- batches


def _tallied(tally: Path, collate: Callable, samples):
    """A collate function that adds one byte to a file for each batch, from whichever process makes it."""
    batch = collate(samples)
    with tally.open("ab", buffering=0) as file:
        file.write(b".")
    return batch


class _Flight:
    """A loader like the learner's, opened: `asked` and `made` count its batches, `batches` is its iterator."""

    def __init__(self, loader: DataLoader, tally: Path, patience_s: float):
        self.asked, self.tally, self.patience_s = 0, tally, patience_s
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        changes = {name: self._drawn(getattr(loader, name)), "collate_fn": partial(_tallied, tally, loader.collate_fn)}
        self.batches = iter(rebuilt(loader, **changes))

    def _drawn(self, sampler) -> Iterator:
        for indices in sampler:
            self.asked += 1
            yield indices

    @property
    def made(self) -> int:
        return self.tally.stat().st_size

    def settle(self):
        """Wait until every batch that was asked for is made, or none has come for `patience_s` seconds."""
        made, since = self.made, time.monotonic()
        while self.made < self.asked and time.monotonic() - since < self.patience_s:
            time.sleep(0.002)
            if self.made > made:
                made, since = self.made, time.monotonic()


@contextlib.contextmanager
def _opened(loader: DataLoader, patience_s: float) -> Iterator[_Flight]:
    with tempfile.NamedTemporaryFile(prefix="perflab-") as tally:
        flight = _Flight(loader, Path(tally.name), patience_s)
        try:
            flight.settle()
            yield flight
        finally:
            cleanup.end_loader_workers(flight.batches)


def in_flight(loader: DataLoader, patience_s: float = 10.0) -> dict[str, int]:
    """How many batches are asked for and made before the loop takes the first, and how many after one.

    A loader like this one is opened and left alone until the workers have made what they were asked for,
    or have made nothing for `patience_s` seconds. The learner's own loader is not touched; without workers
    the one batch is made here.

    >>> in_flight(DataLoader(range(99), num_workers=2, prefetch_factor=4))
    {'asked': 8, 'made': 8, 'after_one': 9}
    """
    _refuse_streams(loader, "in_flight")
    with interrupt.Interruptible() as door:
        return door.call(_or_a_sentence, _counted, loader, patience_s)


def _or_a_sentence(work: Callable[[DataLoader, float], object], loader: DataLoader, patience_s: float):
    """What the work gives; PerflabError in place of an error of the dataset or its workers."""
    try:
        return work(loader, patience_s)
    except PerflabError:
        raise
    except Exception as error:
        caught_in_worker = str(error).startswith("Caught ")
        why = str(error).strip().splitlines()[-1][:200] if caught_in_worker else first_line(error)
        raise PerflabError(f"This loader cannot make its batches ({why}): mend the dataset first.") from None


def _counted(loader: DataLoader, patience_s: float) -> dict[str, int]:
    with _opened(loader, patience_s) as flight:
        counts = {"asked": flight.asked, "made": flight.made}
        next(flight.batches, None)
        flight.settle()
        return counts | {"after_one": flight.made}


def _refuse(loader, name: str):
    if not isinstance(loader, DataLoader):
        raise PerflabError(f"{name} takes a DataLoader, not what you gave ({type(loader).__name__}).")


def _refuse_streams(loader, name: str):
    _refuse(loader, name)
    if isinstance(loader.dataset, IterableDataset):
        raise PerflabError(
            f"{name} counts the lists of indices that a DataLoader draws for a map-style dataset; an iterable "
            f"dataset ({type(loader.dataset).__name__}) has none: count its samples instead."
        )


# -- bytes


def batch_bytes(loader: DataLoader, patience_s: float = 60.0) -> int:
    """The shared memory that one batch takes: one sample is fetched, collated alone and scaled up.

    Tensors count wherever they are in the batch, each rounded up to whole pages; strings and other objects
    travel by a pipe and count nothing. A collate function that pads to the longest sample makes this an
    estimate. The sample is fetched in a forked copy of this process, so that generators, streams and what
    the dataset opens lazily stay as they are here. Raises PerflabError if the sample cannot be had, or not
    within `patience_s` seconds.
    """
    try:
        sizes = value_of_fork(lambda: _sizes(loader), patience_s)
    except PerflabError as reason:
        raise PerflabError(
            f"The first sample cannot be made into a batch ({reason}): mend the dataset before you look at its loader."
        ) from None
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


def _sizes(loader: DataLoader) -> list[int]:
    """The bytes of each tensor of the first batch, were all its samples like the first; none without a batch."""
    batched = loader.batch_sampler is not None
    indices = next(iter(loader.batch_sampler), []) if batched else list(itertools.islice(loader.sampler, 1))
    if isinstance(loader.dataset, IterableDataset):
        samples = list(itertools.islice(loader.dataset, 1))
    else:
        samples = [loader.dataset[i] for i in indices[:1]]
    if not samples:
        return []
    pickler = _TensorPickler(io.BytesIO())
    pickler.dump(loader.collate_fn(samples if batched else samples[0]))
    return [len(indices) * tensor.nbytes for tensor in pickler.tensors.values()]


class _TensorPickler(pickle.Pickler):
    """Pickles a batch as a worker does that sends it, and notes the tensors that go by shared memory instead."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_id(self, x) -> int | None:
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return None
        self.tensors[id(x)] = x
        return id(x)


def flight_bytes(loader: DataLoader) -> int:
    """What the workers may hold ready, in bytes of shared memory: workers x prefetch_factor x batch."""
    _refuse(loader, "flight_bytes")
    return loader.num_workers * (loader.prefetch_factor or 0) * batch_bytes(loader) if loader.num_workers else 0


def seen_bytes(loader: DataLoader, patience_s: float = 10.0) -> int:
    """What a loader like this one takes of /dev/shm when it is opened and left alone. Raises PerflabError
    where there is no /dev/shm. Other users of /dev/shm disturb it."""
    if not SHM.is_dir():
        raise PerflabError("There is no /dev/shm here: shared memory can be watched on Linux only.")
    _refuse_streams(loader, "seen_bytes")
    with interrupt.Interruptible() as door:
        return door.call(_or_a_sentence, _taken, loader, patience_s)


def _taken(loader: DataLoader, patience_s: float) -> int:
    before = machine.shm_bytes()
    with _opened(loader, patience_s):
        taken = 0
        while (now := before - machine.shm_bytes()) != taken:  # the last batch may still be on its way
            taken = now
            time.sleep(0.005)
    return taken


def fitting(loader: DataLoader) -> DataLoader:
    """The loader, if what it may keep in flight fits into what is free; none of its workers is started.

    In `prepare` of a sweep: a value that does not fit becomes a row with its reason. Raises PerflabError
    if the batches in flight and the one in the loop's hands exceed the free bytes of /dev/shm or of RAM.
    """
    _refuse(loader, "fitting")
    if not loader.num_workers:
        return loader
    batch = batch_bytes(loader)
    need = (loader.num_workers * loader.prefetch_factor + 1) * batch
    what = (
        f"{loader.num_workers} x {loader.prefetch_factor} + 1 batches of {quantity(batch, 'bytes')} take "
        f"{quantity(need, 'bytes')}: lower prefetch_factor, use fewer workers or uint8 items"
    )
    if SHM.is_dir() and need > (free := machine.shm_bytes()):
        larger = "enlarge it (docker run --shm-size=8g)"
        raise PerflabError(f"/dev/shm has {quantity(free, 'bytes')} free, and {what}, or {larger}.")
    if need > (free := machine.ram_bytes()):
        raise PerflabError(f"{quantity(free, 'bytes')} of RAM are free, and {what}.")
    return loader


def held_bytes(method: str = "fork") -> int:
    """The private memory (USS) of all children that live now and were started by this method of
    multiprocessing, DataLoader workers among them.

    Pages shared with another process do not count. RSS would count them once for each worker.
    """
    kind, total = multiprocessing.get_context(method).Process, 0
    for child in multiprocessing.active_children():
        if isinstance(child, kind):
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(child.pid).memory_full_info().uss
    return total
