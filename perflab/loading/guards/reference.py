"""A dataset read in one process, without workers: what the guards compare all else with.

It runs in a double of the learner's process and says what it sees; nothing is judged here.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from .case import Case
from .census import of_one_process
from .digest import SOURCES, devices, digest, global_states, tensors
from .double import told
from .pickled import culprit
from .probe import Parts, ProbeStream, Read, attributes, read, with_epoch
from .walk import open_things, piles

BLOCK = 64
FEW_BYTES = 4 * 2**20
INDICES = 100_000  # of an epoch, looked at


def alone(case: Case, say: Callable):
    """Pickling, devices, then every sample once, some twice, a batch, and what the dataset carries."""
    parts, loader = case.parts, case.loader
    named = {type(loader.dataset).__name__: loader.dataset} | {
        name: getattr(loader, name) for name in ("collate_fn", "worker_init_fn") if getattr(loader, name) is not None
    }
    enough = FEW_BYTES if case.method == "fork" else math.inf  # forked workers receive no pickle
    tried = [culprit(name, x, enough) for name, x in named.items()]
    say({"pickling": [found for found in tried if found[1]]})
    say({"piles": piles(parts.roots), "open": {path: fd for path, _, fd in open_things(parts.roots)}})
    say({"handles": {path: (id(x), type(x).__name__) for path, x in of_one_process(parts.roots)}})
    if case.streams:
        _alone_stream(case, say)
        return
    keys, total, epoch = keys_of(loader)
    say({"total": total, "epoch": epoch})
    if not keys:
        say({"keys": []})
        return
    found, default = set(), torch.get_default_device().type
    for key in keys[:2]:
        try:
            found |= devices(parts.item(key))
        except Exception as fault:
            if "CUDA" in str(fault):
                found.add("cuda")
    say({"devices": sorted(found), "default_device": default})
    torch.set_default_device(None)
    if found:
        say({"keys": []})
        return
    _read_alone(case, keys, say)


def _read_alone(case: Case, keys: Sequence, say):
    parts = case.parts
    sources = _used(parts, keys[:32])
    began, reads, at, order = time.perf_counter(), [], 0, keys
    told_at = began
    while at < len(order):
        spent = time.perf_counter() - began
        quickest = min((r.seconds / r.done for r in reads), default=0.0)  # others may have taken the cores
        if spent > 0.1 and order is keys and quickest * len(keys) > case.whole_s:
            order = _scattered(keys, at)
        if spent > (2 * case.whole_s if order is keys else case.partial_s):
            break
        reads.append(read(parts, at, order[at : at + BLOCK], sources, until=0.2))
        at += reads[-1].done
        if time.perf_counter() - told_at > 0.2:
            told_at = time.perf_counter()
            say({"at": at})
    seen = joined(reads)
    order = list(order[:at])
    say({"keys": order, "seen": seen, "sources": sources})
    few = _spread(at, 256)
    again = _again(parts, order, few, sources, 0.3 * case.partial_s)
    both = [k for k in again if k not in seen.errors]
    say({"own_random": any(again[k][0] != int(seen.digests[k]) for k in both)})
    say({"own_forms": any(again[k][1] != seen.forms[k] for k in both if k in seen.forms)})
    say(_batch(case, [order[k] for k in range(at) if k not in seen.errors]))
    if with_epoch(parts):
        say({"epoch_alone": _epoch_alone(parts, order[: few_items(case, seen)])})


def keys_of(loader: DataLoader) -> tuple[Sequence, int, dict]:
    """The indices to read, how many the dataset has, and the indices and batches of an epoch as samplers give them."""
    n = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    facts: dict = {"error": ""}
    sampler, batches = loader.sampler, loader.batch_sampler
    facts |= {"size": loader.batch_size, "drop_last": loader.drop_last}
    plain = batches is None or type(batches) is BatchSampler
    if type(batches) is BatchSampler:  # given as one, the loader's own sampler is another
        sampler, facts["size"], facts["drop_last"] = batches.sampler, batches.batch_size, batches.drop_last
    standard = type(sampler) in (SequentialSampler, RandomSampler, WeightedRandomSampler) and plain
    epoch: list = []
    try:
        if standard:  # not gone through: a shuffle of a billion indices is a list of them
            facts["samples"] = len(sampler)
        elif plain:
            epoch = list(itertools.islice(sampler, INDICES))
            facts["samples"] = len(sampler) if hasattr(sampler, "__len__") else len(epoch)
        else:
            sizes = []
            for batch in itertools.islice(batches, INDICES):
                sizes.append(len(batch))
                epoch += batch
                if len(epoch) > INDICES:
                    break
            facts |= {"samples": len(epoch), "sizes": sizes}
        facts |= {"read": len(epoch), "distinct": len(_unique(epoch)), "standard": type(sampler).__name__ * standard}
    except Exception as fault:
        epoch, facts["error"] = [], told(fault)
    if n is not None and not epoch:
        keys = range(n)
    elif n is None and not epoch:
        keys = _by_trying(loader.dataset)
    else:
        try:
            keys = list(dict.fromkeys(epoch))
        except TypeError:  # keys that are lists
            keys = epoch
    return keys, len(keys) if n is None else n, facts


def _unique(epoch: list) -> set:
    try:
        return set(epoch)
    except TypeError:
        return {digest(key) for key in epoch}


def _by_trying(dataset) -> list:
    """Indices from 0 to the first that does not exist, for a dataset that knows no length."""
    until = time.perf_counter() + 1.0
    for n in range(10_000):
        if time.perf_counter() > until:
            return list(range(n))
        try:
            dataset[n]
        except (IndexError, KeyError, StopIteration):
            return list(range(n))
        except Exception:
            continue
    return list(range(10_000))


def _used(parts: Parts, keys: list) -> tuple[str, ...]:
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
        after = global_states()
        used |= {name for name in before if before[name] != after[name]}
        if len(used) == len(SOURCES):
            break
    return tuple(name for name in SOURCES if name in used)


def _scattered(keys: Sequence, begin: int) -> list:
    """The first `begin`, then runs of neighbours from all over: they stand for the whole, and caches still serve."""
    runs = np.random.default_rng(0).integers(0, -(-len(keys) // BLOCK), 2**12)
    starts = [start for start in dict.fromkeys((runs * BLOCK).tolist()) if start >= begin]
    return [*keys[:begin], *(key for start in starts for key in keys[start : start + BLOCK])]


def few_items(case: Case, seen: Read) -> int:
    """How many samples can be read in a moment: 64, or fewer where they are slow."""
    return max(1, min(64, seen.done, int(0.5 * case.partial_s * seen.done / seen.seconds)))


def _spread(n: int, most: int) -> list[int]:
    return list(range(0, n, max(1, n // most)))[:most]


def _again(parts: Parts, keys: list, places: list[int], sources, seconds: float) -> dict[int, tuple[int, str]]:
    """Digest and form of some places, read once more."""
    out, until = {}, time.perf_counter() + seconds
    for k in places:
        seen = read(parts, k, [keys[k]], sources)
        if not seen.errors:
            out[k] = int(seen.digests[0]), seen.forms.get(k, "")
        if time.perf_counter() > until:
            break
    return out


def joined(reads: list[Read]) -> Read:
    """Readings of neighbouring places as one."""
    whole = Read(0)
    whole.digests = np.concatenate([r.digests[: r.done] for r in reads])
    for r in reads:
        whole.errors |= r.errors
        whole.forms |= r.forms
        whole.done += r.done
        whole.seconds += r.seconds
    return whole


def _unsendable(batch) -> str:
    """Why a worker could not send this batch to the main process; then it drops it, and the loop waits for ever."""
    try:
        ForkingPickler.dumps(batch)
    except (TypeError, AttributeError, PicklingError) as fault:
        return told(fault)
    except Exception as fault:  # too many descriptors, say: another guard's
        return told(fault) if "requires_grad" in str(fault) else ""
    return ""


def _batch(case: Case, keys: list) -> dict:
    """One batch, collated here: its tensors, or why it fails."""
    loader = case.loader
    size = (loader.batch_size or 8) if case.parts.batches else 1
    try:
        samples, until = [], time.perf_counter() + 0.3
        for key in keys[: min(size, 512)]:
            samples.append(case.parts.item(key))
            if time.perf_counter() > until and len(samples) > 1:
                break
        if not samples:
            return {"batch_tensors": 0, "collate_error": ""}
        batch = case.parts.batch(samples)
        found = {"batch_tensors": sum(1 for _ in tensors(batch)), "collate_error": "", "devices_batch": devices(batch)}
        return found if found["devices_batch"] else found | {"unsendable": _unsendable(batch)}
    except Exception as fault:
        return {"batch_tensors": 0, "collate_error": told(fault)}


def _epoch_alone(parts: Parts, keys: list) -> dict:
    """What set_epoch changes where there are no workers: samples, and attributes of its owners."""
    before, held = read(parts, 0, keys), [attributes(x) for _, x in with_epoch(parts)]
    error = set_epoch(parts)
    after, then = read(parts, 0, keys), [attributes(x) for _, x in with_epoch(parts)]
    return {
        "paths": [path for path, _ in with_epoch(parts)],
        "samples": bool((before.digests != after.digests).any()),
        "attributes": held != then,
        "error": error,
    }


def set_epoch(parts: Parts) -> str:
    """Call every set_epoch of the dataset with an epoch that it is not in; the error's words, if it fails."""
    try:
        for _, x in with_epoch(parts):
            before = attributes(x)
            x.set_epoch(1)
            if attributes(x) == before:
                x.set_epoch(2)
    except Exception as fault:
        return told(fault)
    return ""


def _alone_stream(case: Case, say):
    """The whole stream once where time allows, and its beginning once more."""
    say({"default_device": torch.get_default_device().type})
    for name, content in ProbeStream(case.parts, alike=True, most=10_000_000, seconds=case.whole_s):
        say({"at": content} if name == "at" else {f"stream {name}": content})
    torch.set_default_device(None)
    again = ProbeStream(case.parts, alike=True, most=512, seconds=0.3 * case.partial_s)
    for name, content in again:
        if name == "stream":
            say({"stream again": content})
    samples = []
    try:
        samples = list(itertools.islice(case.parts.dataset, min(case.loader.batch_size or 1, 512)))
        batch = case.parts.batch(samples) if samples else []
        say({"batch_tensors": sum(1 for _ in tensors(batch)), "collate_error": ""})
    except Exception as fault:
        say({"batch_tensors": 0, "collate_error": told(fault)})
    if with_epoch(case.parts):
        before = _stream_now(case)
        held = [attributes(x) for _, x in with_epoch(case.parts)]
        error = set_epoch(case.parts)
        after, then = _stream_now(case), [attributes(x) for _, x in with_epoch(case.parts)]
        changed = not np.array_equal(before["digests"], after["digests"])
        paths = [path for path, _ in with_epoch(case.parts)]
        say({"epoch_alone": {"paths": paths, "samples": changed, "attributes": held != then, "error": error}})


def _stream_now(case: Case) -> dict:
    probe = ProbeStream(case.parts, alike=True, most=64, seconds=0.3)
    return next(content for name, content in probe if name == "stream")
