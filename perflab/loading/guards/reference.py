"""A dataset read in one process, without workers: what the guards compare all else with.

It runs in a copy of the learner's process and says what it sees; nothing is judged here.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from perflab.errors import first_line

from .digest import SOURCES, devices, digest, global_states, tensors
from .evidence import Epoch, EpochChange, Evidence
from .pickled import culprit
from .probe import Parts, ProbeStream, Read, StreamRead, read
from .resources import of_one_process
from .walk import long_containers, open_files

BLOCK = 64
FEW_BYTES = 4 * 2**20
INDICES = 100_000  # of an epoch, looked at
UNKNOWN_LENGTH = 10_000  # indices tried of a dataset that knows no length
LONGEST_BATCH = 512


def read_here(evidence: Evidence, say: Callable):
    """Pickling and what the dataset carries, devices, then every sample once, some twice, and a batch."""
    parts = evidence.parts
    enough = FEW_BYTES if evidence.method == "fork" else math.inf  # forked workers receive no pickle
    obstacles = [culprit(name, x, enough) for name, x in parts.roots.items()]
    unpicklable = [(path, kind, words) for path, kind, words in obstacles if kind]
    say(unpicklable=unpicklable, start="fork" if unpicklable else evidence.start)
    say(
        long_containers=long_containers(parts.roots),
        open_files={path: fd for path, _, fd in open_files(parts.roots)},
        handles={path: (id(x), type(x).__name__) for path, x in of_one_process(parts.roots)},
        default_device=torch.get_default_device().type,
    )
    if evidence.streams:
        _read_stream(evidence, say)
        return
    keys, total, epoch = keys_of(evidence.loader)
    say(total=total, epoch=epoch)
    if not keys:
        return
    say(devices=set().union(*(_devices_of(parts, key) for key in keys[:2])))
    torch.set_default_device(None)
    if not evidence.devices:
        _read_items(evidence, keys, say)


def _devices_of(parts: Parts, key) -> set[str]:
    try:
        return devices(parts.item(key))
    except Exception as error:
        return {"cuda"} if "CUDA" in str(error) else set()


def _read_items(evidence: Evidence, keys: Sequence, say: Callable):
    parts = evidence.parts
    sources = _used(parts, keys[:32])
    order, reading = _read_in_time(evidence, keys, sources, say)
    say(keys=order, read=reading, sources=sources)
    again = _again(evidence, 256, 0.3 * evidence.partial_s)
    both = {place: r for place, r in again.items() if place not in reading.errors}
    forms = {place: r.forms[place] for place, r in both.items() if place in r.forms and place in reading.forms}
    say(own_random=any(r.digests[0] != reading.digests[place] for place, r in both.items()))
    say(own_forms=any(form != reading.forms[place] for place, form in forms.items()))
    say(**_batch(evidence, (parts.item(key) for key in evidence.good_keys)))
    if parts.epoch_owners():
        few = order[: evidence.few]
        say(epoch_here=_epoch_change(parts, lambda: read(parts, 0, few).digests))


def _read_in_time(evidence: Evidence, keys: Sequence, sources, say: Callable) -> tuple[list, Read]:
    """The keys that were read, and their reading: all where time allows, else runs from all over."""
    began, reads, at, order = time.perf_counter(), [], 0, keys
    while at < len(order):
        spent = time.perf_counter() - began
        quickest = min((r.seconds / r.done for r in reads), default=0.0)  # others may have taken the cores
        if spent > 0.1 and order is keys and quickest * len(keys) > evidence.whole_s:
            order = _scattered(keys, at)
        if spent > (2 * evidence.whole_s if order is keys else evidence.partial_s):
            break
        reads.append(read(evidence.parts, at, order[at : at + BLOCK], sources, until=0.2))
        at += reads[-1].done
        say()
    return list(order[:at]), Read.joined(reads)


def keys_of(loader: DataLoader) -> tuple[Sequence, int, Epoch]:
    """The indices to read, how many the dataset has, and the indices and batches of an epoch as samplers give them."""
    sampler, batches = loader.sampler, loader.batch_sampler
    epoch, indices = Epoch(size=loader.batch_size, drop_last=loader.drop_last), []
    plain = batches is None or type(batches) is BatchSampler
    if type(batches) is BatchSampler:  # given as one, the loader's own sampler is another
        sampler, epoch.size, epoch.drop_last = batches.sampler, batches.batch_size, batches.drop_last
    try:
        if plain and type(sampler) in (SequentialSampler, RandomSampler, WeightedRandomSampler):
            epoch.standard = type(sampler).__name__  # not gone through: a shuffle of a billion indices is a list
            epoch.samples = len(sampler)
        elif plain:
            indices = list(itertools.islice(sampler, INDICES))
            epoch.samples = len(sampler) if hasattr(sampler, "__len__") else len(indices)
        else:
            epoch.sizes = []
            for batch in itertools.islice(batches, INDICES):
                epoch.sizes.append(len(batch))
                indices += batch
                if len(indices) > INDICES:
                    break
            epoch.samples = len(indices)
        distinct = _distinct(indices)
        epoch.read, epoch.distinct = len(indices), len(distinct)
    except Exception as error:
        distinct, epoch.error = [], first_line(error)
    known = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    keys = distinct or (_by_trying(loader.dataset) if known is None else range(known))
    return keys, len(keys) if known is None else known, epoch


def _distinct(indices: list) -> list:
    try:
        return list(dict.fromkeys(indices))
    except TypeError:  # indices that are lists
        return list({digest(index): index for index in indices}.values())


def _by_trying(dataset) -> range:
    """Indices from 0 to the first that does not exist, for a dataset that knows no length."""
    until = time.perf_counter() + 1.0
    for n in range(UNKNOWN_LENGTH):
        if time.perf_counter() > until:
            return range(n)
        try:
            dataset[n]
        except (IndexError, KeyError, StopIteration):
            return range(n)
        except Exception:
            continue
    return range(UNKNOWN_LENGTH)


def _used(parts: Parts, keys: Sequence) -> tuple[str, ...]:
    """The global random streams that reading moves."""
    used, until = set(), time.perf_counter() + 0.2
    for key in keys:
        if time.perf_counter() > until:
            break
        before = global_states()
        try:
            parts.item(key)
        except Exception:
            continue
        used |= {name for name, state in global_states().items() if before[name] != state}
    return tuple(name for name in SOURCES if name in used)


def _scattered(keys: Sequence, begin: int) -> list:
    """The first `begin`, then runs of neighbours from all over: they stand for the whole, and caches still serve."""
    runs = np.random.default_rng(0).integers(0, -(-len(keys) // BLOCK), 2**12)
    starts = [start for start in dict.fromkeys((runs * BLOCK).tolist()) if start >= begin]
    return [*keys[:begin], *(key for start in starts for key in keys[start : start + BLOCK])]


def _again(evidence: Evidence, most: int, seconds: float) -> dict[int, Read]:
    """Some places from all over, read once more."""
    again, until = {}, time.perf_counter() + seconds
    for place in range(0, len(evidence.keys), max(1, len(evidence.keys) // most))[:most]:
        reading = read(evidence.parts, place, [evidence.keys[place]], evidence.sources)
        if not reading.errors:
            again[place] = reading
        if time.perf_counter() > until:
            break
    return again


def _batch(evidence: Evidence, samples: Iterable) -> dict:
    """One batch, collated here: its tensors and devices, or why it fails."""
    size = (evidence.loader.batch_size or 8) if evidence.parts.batches else 1
    try:
        taken, until = [], time.perf_counter() + 0.3
        for sample in itertools.islice(samples, min(size, LONGEST_BATCH)):
            taken.append(sample)
            if time.perf_counter() > until and len(taken) > 1:
                break
        if not taken:
            return {"batch_tensors": 0}
        batch = evidence.parts.batch(taken)
        facts = {"batch_tensors": sum(1 for _ in tensors(batch)), "batch_devices": devices(batch)}
        return facts if facts["batch_devices"] else facts | {"unsendable": _unsendable(batch)}
    except Exception as error:
        return {"batch_tensors": 0, "collate_error": first_line(error)}


def _unsendable(batch) -> str:
    """Why a worker could not send this batch to the main process; then it drops it, and the loop waits for ever."""
    try:
        ForkingPickler.dumps(batch)
    except (TypeError, AttributeError, PicklingError) as error:
        return first_line(error)
    except Exception as error:  # too many descriptors, say: another guard's
        return first_line(error) if "requires_grad" in str(error) else ""
    return ""


def _epoch_change(parts: Parts, sample_digests: Callable[[], np.ndarray]) -> EpochChange:
    """What set_epoch changes where there are no workers."""
    samples, attributes = sample_digests(), parts.epoch_attributes()
    error = parts.set_epoch()
    return EpochChange(
        paths=[path for path, _ in parts.epoch_owners()],
        samples=not np.array_equal(samples, sample_digests()),
        attributes=attributes != parts.epoch_attributes(),
        error=error,
    )


def _read_stream(evidence: Evidence, say: Callable):
    """The whole stream once where time allows, and its beginning once more."""
    parts = evidence.parts

    def reading(most: int, seconds: float) -> StreamRead:
        for name, content in ProbeStream(parts, True, most, seconds):
            say()
            if name == "stream":
                stream = content
        return stream

    say(stream=reading(10_000_000, evidence.whole_s))
    torch.set_default_device(None)
    again = reading(LONGEST_BATCH, 0.3 * evidence.partial_s).digests
    first = evidence.stream.digests if evidence.stream.ended else evidence.stream.digests[: len(again)]
    say(own_random=not np.isin(again, first).all())
    say(**_batch(evidence, parts.dataset))
    if parts.epoch_owners():
        say(epoch_here=_epoch_change(parts, lambda: reading(64, 0.3).digests))
