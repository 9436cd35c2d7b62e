"""The rules about randomness, epochs and batches: from what was seen to words. Nothing is read here."""

from itertools import combinations, pairwise

import numpy as np

from .digest import SOURCES
from .evidence import Check, Draws, Evidence, alarm, fine, unchecked
from .rules_samples import hindered

RESEED = "Make the generator in the worker, from torch.utils.data.get_worker_info().seed: in worker_init_fn, or lazily."


def random_streams(evidence: Evidence) -> Check:
    if reason := hindered(evidence):
        return reason
    runs = [run for run in evidence.runs if run.workers == evidence.trial_workers and not run.content]
    epochs = [draws for run in runs if (draws := run.streams if evidence.streams else run.draws)]
    if not epochs:
        return unchecked(f"No worker drew a sample: {evidence.ended or 'too little time'}.")
    every = [draws for epoch in epochs for draws in epoch.values()]
    if errors := [draws.error for draws in every if draws.error]:
        return unchecked(f"The same samples cannot be read twice by a worker: {errors[0]}.")
    ignored = _generators_of_order(evidence, every)
    first, n = epochs[0], len(epochs[0])
    twins = _equal([(first[a], first[b]) for a, b in combinations(sorted(first), 2)], ignored)
    if twins:
        what = f"{n} workers draw the same random numbers ({twins}): every change comes {n} times."
        return alarm(what, f"equal streams: {twins}", RESEED)
    for before, after in pairwise(epochs):
        repeated = _equal([(before[worker], after[worker]) for worker in before.keys() & after.keys()], ignored)
        if repeated:
            what = f"Each epoch draws the same random numbers as the one before ({repeated})."
            return alarm(what, f"repeated streams: {repeated}", RESEED)
    moved = {name for draws in every for name in draws.moved} - ignored
    if not moved and all(len(set(draws.own)) <= 1 for draws in every):
        return fine("The samples draw no random numbers.")
    what = f"{n} workers draw different numbers, and so do {len(epochs)} epochs."
    return fine(what, f"streams in use: {_named(moved) or 'of its own'}")


def _generators_of_order(evidence: Evidence, every: list[Draws]) -> set[str]:
    """Generators of a stream's own that set the order alone: the samples of all workers are those of one process."""
    if not evidence.streams:
        return set()
    whole = evidence.stream.digests
    reads = [run.digests for run in evidence.content_runs if run.streams]
    if not reads or any(np.isin(read, whole).sum() < len(read) - evidence.trial_workers for read in reads):
        return set()
    return {name for draws in every for name in draws.moved} - set(SOURCES)


def _equal(pairs: list[tuple[Draws, Draws]], ignored: set[str]) -> str:
    """The streams that stand alike in both of a pair and are drawn from, in words."""
    names: set[str] = set()
    for a, b in pairs:
        alike = {name for name in a.moved if name in b.moved and a.after[name] == b.after.get(name)} - ignored
        n = min(len(a.own), len(b.own))
        if not alike and n >= 4 and a.own[:n] == b.own[:n] and len(set(a.own[:n])) > 2:
            alike = {""}  # one that no walk found
        names |= alike
    return _named(names)


def _named(names: set[str]) -> str:
    return ", ".join(name or "a generator of its own" for name in sorted(names))


def set_epoch(evidence: Evidence) -> Check:
    here, there, loader = evidence.epoch_here, evidence.epoch_in_workers, evidence.loader
    if here is None:
        nothing = f"Reading ended: {evidence.ended}." if evidence.ended else "Nothing in the dataset has a set_epoch."
        return hindered(evidence) or fine(nothing)
    paths = ", ".join(here.paths)
    if here.error:
        return unchecked(f"set_epoch fails: {here.error}.")
    if not (loader.persistent_workers and loader.num_workers):
        return fine(f"Workers start anew each epoch and see the epoch of {paths}; persistent ones might not.")
    if there is None:
        return unchecked(f"The workers gave nothing to judge by: {evidence.ended or 'too little time'}.")
    stale = not there.attributes if evidence.own_random else here.samples and not there.samples
    if stale and (here.samples or here.attributes):
        return alarm(
            f"Persistent workers do not see set_epoch of {paths}: each keeps its copy from the first epoch.",
            "samples after set_epoch: changed in the main process, unchanged in a worker",
            "Keep the epoch in shared memory (a torch tensor after share_memory_()), or do without persistent_workers.",
        )
    return fine(f"Persistent workers see set_epoch of {paths}, or it changes no sample.")


def last_batch(evidence: Evidence) -> Check:
    epoch, size = evidence.epoch, evidence.loader.batch_size
    if evidence.bare:
        return unchecked("A dataset alone has no batches; give its DataLoader.")
    if evidence.streams:
        return _last_of_streams(evidence, size) if size else fine("The dataset makes its own batches.")
    if epoch is None or epoch.error:
        return unchecked("The indices of an epoch were not read.")
    n, size = epoch.samples, epoch.size
    if epoch.sizes is None and not size:
        return fine("The loader makes no batches.")
    sizes = epoch.sizes
    lost = n % size if size and epoch.drop_last else 0
    if sizes is not None:
        batches, most, last = len(sizes), max(sizes, default=0), sizes[-1] if sizes else 0
    else:
        batches, most = (n // size if epoch.drop_last else -(-n // size)), min(n, size)
        last = size if epoch.drop_last or n % size == 0 else n % size
    if not batches:
        what = f"The loader gives no batch at all: {n:,} samples, batch_size={size}, drop_last={epoch.drop_last}."
        return alarm(what, "0 batches", "Take a smaller batch_size, or drop_last=False.")
    figures = f"{batches:,} batches, the last of {last:,}"
    if last == 1 and most > 1:
        what = f"The last batch has one sample ({n:,} samples): BatchNorm fails on it in training."
        return alarm(what, figures, "For training, drop_last=True; it loses one sample.")
    if n == 1 and size and size > 1:
        return fine("The only batch has one sample: BatchNorm fails on it in training.", figures)
    if last < most:
        return fine(f"The last batch has {last:,} samples of {most:,}: measure per sample, not per batch.", figures)
    return fine(f"All batches are alike{f'; drop_last leaves out {lost:,} samples' if lost else ''}.", figures)


def _last_of_streams(evidence: Evidence, size: int) -> Check:
    runs = [run for run in evidence.content_runs if run.workers == evidence.trial_workers]
    if not runs or not all(read.ended for read in runs[0].streams.values()):
        return unchecked("The stream was not read to its end by workers.")
    loader = evidence.loader
    readers = runs[0].streams.values() if loader.num_workers else [evidence.stream]
    counts = [len(read.digests) for read in readers]
    if not sum(counts):
        return alarm("The loader gives no batch at all: the stream is empty.", "0 samples", "Look at what it reads.")
    partial = [n % size for n in counts if n % size]
    lost = sum(partial)
    figures = f"samples left over, by worker: {', '.join(map(str, partial)) or 'none'}"
    if loader.drop_last and max(counts) < size:
        what = f"The loader gives no batch at all: no worker has {size:,} samples, and drop_last is on."
        return alarm(what, figures, "Take a smaller batch_size, or drop_last=False.")
    if loader.drop_last and lost >= size:
        what = f"drop_last drops in every worker: {lost:,} of {sum(counts):,} samples are lost."
        return alarm(what, figures, "Use drop_last=False, or share out batches instead of samples.")
    if loader.drop_last:
        return fine(f"drop_last leaves out {lost:,} samples of {len(counts)} workers.", figures)
    if 1 in partial and size > 1:
        what = f"{partial.count(1)} batches of an epoch have one sample: BatchNorm fails on them in training."
        return alarm(what, figures, "For training, drop_last=True; or share the samples out in whole batches.")
    if partial:
        what = f"{len(partial)} batches of an epoch are partial, one a worker: measure per sample, not per batch."
        return fine(what, figures)
    return fine("All batches are alike.", figures)
