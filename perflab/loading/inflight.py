"""What a DataLoader keeps in flight: batches counted, bytes predicted and seen, and whether they fit.

Workers started by spawn or forkserver import this file: nothing that draws or teaches may enter.
"""

import contextlib
import itertools
import mmap
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from perflab.bench import cleanup, interrupt, machine
from perflab.bench.estimate import Estimate
from perflab.bench.result import Metric, label
from perflab.bench.units import quantity
from perflab.errors import PerflabError

from .rebuild import rebuilt

# -- batches


class _Asked:
    """A sampler that counts what was drawn from it, in the process that draws."""

    def __init__(self, sampler):
        self.sampler, self.drawn = sampler, 0

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        for x in self.sampler:
            self.drawn += 1
            yield x


class _Tallied:
    """A collate function that adds one byte to a file for each batch it makes, from whichever process."""

    def __init__(self, collate, path: str):
        self.collate, self.path = collate, path

    def __call__(self, samples):
        batch = self.collate(samples)
        with open(self.path, "ab", buffering=0) as tally:
            tally.write(b".")
        return batch


class _Flight:
    """A loader like the learner's, opened: `asked` and `made` count its batches, `batches` is its iterator."""

    def __init__(self, loader: DataLoader, tally: Path, patience_s: float):
        self._tally, self._patience_s = tally, patience_s
        self._sampler = _Asked(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        whole = {"batch_sampler": self._sampler, "batch_size": 1, "sampler": None, "drop_last": False}
        how = whole if loader.batch_sampler is not None else {"sampler": self._sampler}
        self._loader = rebuilt(loader, collate_fn=_Tallied(loader.collate_fn, str(tally)), **how)
        self.batches = iter(self._loader)

    @property
    def asked(self) -> int:
        return self._sampler.drawn

    @property
    def made(self) -> int:
        return self._tally.stat().st_size

    def settle(self):
        """Wait until every batch that was asked for is made, or none has come for `patience_s` seconds."""
        seen, since = self.made, time.monotonic()
        while self.made < self.asked and time.monotonic() - since < self._patience_s:
            time.sleep(0.002)
            if self.made > seen:
                seen, since = self.made, time.monotonic()


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
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise PerflabError(
            "in_flight counts the lists of indices that a DataLoader draws for a map-style dataset; "
            f"{_named(loader)} has none: count its samples instead."
        )
    with interrupt.Interruptible() as door:
        return door.call(_or_a_sentence, lambda: _counted(loader, patience_s))


def _or_a_sentence(work: Callable[[], int]):
    """What the work gives; PerflabError in place of an error of the dataset or its workers."""
    try:
        return work()
    except PerflabError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        why = lines[-1] if lines[0].startswith("Caught ") else lines[0]
        raise PerflabError(f"This loader cannot make its batches ({why[:200]}): mend the dataset first.") from None


def _counted(loader: DataLoader, patience_s: float) -> dict[str, int]:
    with _opened(loader, patience_s) as flight:
        counts = {"asked": flight.asked, "made": flight.made}
        next(flight.batches, None)
        flight.settle()
        return counts | {"after_one": flight.made}


def _named(loader) -> str:
    if isinstance(loader, DataLoader):
        return f"an iterable dataset ({type(loader.dataset).__name__})"
    return f"what you gave ({type(loader).__name__})"


# -- bytes


def batch_bytes(loader: DataLoader, patience_s: float = 60.0) -> int:
    """The shared memory that one batch takes: one sample is fetched, collated alone and scaled up.

    Tensors in lists, tuples, mappings and attributes count, each rounded up to whole pages; strings and
    other objects travel by a pipe and count nothing. A collate function that pads to the longest sample
    makes this an estimate. The sample is fetched in a forked copy of this process, so that generators,
    streams and what the dataset opens lazily stay as they are here. Raises PerflabError if the sample
    cannot be had, or not within `patience_s` seconds.
    """
    answer = _in_a_copy(lambda: _sizes(loader), patience_s)
    if isinstance(answer, str):
        raise PerflabError(
            f"The first sample cannot be made into a batch ({answer}): mend the dataset before you look at its loader."
        )
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in answer)


def _in_a_copy(work: Callable[[], object], patience_s: float):
    """What `work` returns in a fork of this process, or the text of its error."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, work), daemon=True)
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(patience_s) else f"no answer within {patience_s:g} s"
    except EOFError:
        return "the process that tried it died"
    finally:
        child.kill()
        child.join()
        ours.close()


def _answer(pipe, work: Callable[[], object]):
    torch.set_num_threads(1)  # the pool of threads did not come along
    try:
        pipe.send(work())
    except Exception as e:
        pipe.send(f"{type(e).__name__}: {e}")


def _sizes(loader: DataLoader) -> list[int]:
    """The bytes of each tensor of a full batch; none where there is no sample."""
    data, batched = loader.dataset, loader.batch_sampler is not None
    iterable = isinstance(data, IterableDataset)
    if not iterable and hasattr(data, "__len__") and not len(data):
        return []
    found = list(itertools.islice(data, 1)) if iterable else [data[0]]
    size = 1
    if batched:
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        size = size or len(next(iter(loader.batch_sampler), ()))  # a batch sampler of the learner's own
        if hasattr(data, "__len__") and not iterable:
            size = min(size, len(data))
    return [size * n for x in found for n in _shared(loader.collate_fn([x] if batched else x), set())]


def _shared(x, seen: set) -> list[int]:
    """The bytes of each tensor in a batch that goes through shared memory."""
    if id(x) in seen or isinstance(x, str | bytes | int | float | None):
        return []
    seen.add(id(x))
    if isinstance(x, torch.Tensor):
        return [x.numel() * x.element_size()] if x.device.type == "cpu" else []
    members = (
        x.values()
        if isinstance(x, Mapping)
        else x
        if isinstance(x, list | tuple)
        else vars(x).values()
        if hasattr(x, "__dict__")
        else ()
    )
    return [size for member in members for size in _shared(member, seen)]


def _checked(loader, name: str):
    if not isinstance(loader, DataLoader):
        raise PerflabError(f"{name} takes a DataLoader, not {_named(loader)}.")


def flight_bytes(loader: DataLoader) -> int:
    """What the workers may hold ready, in bytes of shared memory: workers x prefetch_factor x batch."""
    _checked(loader, "flight_bytes")
    return loader.num_workers * (loader.prefetch_factor or 0) * batch_bytes(loader) if loader.num_workers else 0


def seen_bytes(loader: DataLoader, patience_s: float = 10.0) -> int:
    """What a loader like this one takes of /dev/shm when it is opened and left alone. Raises PerflabError
    where there is no /dev/shm. Other users of /dev/shm disturb it."""
    if not Path("/dev/shm").is_dir():
        raise PerflabError("There is no /dev/shm here: shared memory can be watched on Linux only.")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise PerflabError(f"seen_bytes takes a DataLoader over a map-style dataset, not {_named(loader)}.")
    with interrupt.Interruptible() as door:
        return door.call(_or_a_sentence, lambda: _taken(loader, patience_s))


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
    _checked(loader, "fitting")
    if not loader.num_workers:
        return loader
    batch, ahead = batch_bytes(loader), loader.num_workers * loader.prefetch_factor
    need = (ahead + 1) * batch
    what = (
        f"{loader.num_workers} x {loader.prefetch_factor} + 1 batches of {quantity(batch, 'bytes')} take "
        f"{quantity(need, 'bytes')}: lower prefetch_factor, use fewer workers or uint8 items"
    )
    if Path("/dev/shm").is_dir() and need > (free := machine.shm_bytes()):
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


@contextlib.contextmanager
def ending(loader: DataLoader) -> Iterator[DataLoader]:
    """The loader, whose workers are ended on the way out, whichever way that is."""
    try:
        yield loader
    finally:
        cleanup.end_loader_workers(loader)


# -- differences


def difference(metric: Metric, a, b) -> Estimate:
    """`a` minus `b`, from the rounds in which both were measured: what an epoch saves, in the metric's unit."""
    what = f"{metric.name} of {label(a)} - {label(b)}"
    if (missing := metric.ratio(a, b)).why:
        return Estimate.missing(what, missing.why, metric.source)
    ours, theirs = metric.rounds[label(a)], metric.rounds[label(b)]
    return Estimate.of([ours[r] - theirs[r] for r in ours if r in theirs], what, metric.unit, metric.source)
