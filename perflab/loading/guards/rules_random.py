"""The rules about randomness, epochs and batches: from what was seen to words. Nothing is read here."""

from itertools import combinations, pairwise

import numpy as np

from .digest import SOURCES
from .rules_samples import ALARM, FINE, NOT_CHECKED, Evidence, hindered

RESEED = "Make the generator in the worker, from torch.utils.data.get_worker_info().seed: in worker_init_fn, or lazily."


def random_streams(seen: Evidence):
    if reason := hindered(seen):
        return reason
    kind = "streams" if seen.case.streams else "draws"
    own = [c for c in seen.crews if c["crew"] == seen.case.workers and c[kind] and not c.get("content")]
    epochs = [c[kind] for c in own if not c.get("yielding")]
    if not epochs:
        return NOT_CHECKED, f"No worker drew a sample: {seen.ended or 'too little time'}."
    if error := next((d["error"] for e in epochs for d in e.values() if d["error"]), ""):
        return NOT_CHECKED, f"The same samples cannot be read twice by a worker: {error}."
    if seen.case.streams and _order_only(seen):
        epochs = [{w: {**d, "moved": [m for m in d["moved"] if m in SOURCES]} for w, d in e.items()} for e in epochs]
    twins = [_equal(epochs[0][a], epochs[0][b]) for a, b in combinations(sorted(epochs[0]), 2)]
    if names := sorted(set().union(*twins)):
        n = len(epochs[0])
        what = f"{n} workers draw the same random numbers ({_named(names)}): every change comes {n} times."
        return ALARM, what, f"equal streams: {_named(names)}", RESEED
    for before, after in pairwise(epochs):
        again = [_equal(before[w], after[w]) for w in before.keys() & after.keys()]
        if names := sorted(set().union(*again)):
            what = f"Each epoch draws the same random numbers as the one before ({_named(names)})."
            return ALARM, what, f"repeated streams: {_named(names)}", RESEED
    moved = sorted({name for e in epochs for d in e.values() for name in d["moved"]})
    if not moved and all(len(set(d.get("own", ()))) <= 1 for e in epochs for d in e.values()):
        return FINE, "The samples draw no random numbers."
    what = f"{len(epochs[0])} workers draw different numbers, and so do {len(epochs)} epochs."
    return FINE, what, f"streams in use: {_named(moved) or 'of its own'}"


def _order_only(seen: Evidence) -> bool:
    """Are the samples of all workers together those of one process? Then its own generators set their order alone."""
    whole = np.sort(seen.alone.stream["digests"])
    crews = seen.crew(content=True)
    read = [np.sort(np.concatenate([s["digests"] for s in c["streams"].values()])) for c in crews if c["streams"]]
    return bool(read) and all(np.isin(r, whole).sum() >= len(r) - seen.case.workers for r in read)


def _equal(a: dict, b: dict) -> set[str]:
    """The streams that stand alike in two workers and are drawn from; "" for one that no walk found."""
    names = {m for m in a["moved"] if m in b["moved"] and a["after"][m] == b["after"].get(m)}
    ours, theirs = a.get("own", []), b.get("own", [])
    n = min(len(ours), len(theirs))
    if not names and n >= 4 and ours[:n] == theirs[:n] and len(set(ours[:n])) > 2:
        names = {""}
    return names


def _named(names) -> str:
    return ", ".join(name or "a generator of its own" for name in names)


def set_epoch(seen: Evidence):
    alone, workers = seen.facts.get("epoch_alone"), seen.facts.get("epoch_workers")
    if alone is None:
        if reason := hindered(seen):
            return reason
        return FINE, "Nothing in the dataset has a set_epoch." if not seen.ended else f"Reading ended: {seen.ended}."
    paths = ", ".join(alone["paths"])
    if alone["error"]:
        return NOT_CHECKED, f"set_epoch fails: {alone['error']}."
    persist = seen.case.loader.persistent_workers and seen.case.loader.num_workers
    if not persist:
        return FINE, f"Workers start anew each epoch and see the epoch of {paths}; persistent ones might not."
    if workers is None:
        return NOT_CHECKED, f"The workers gave nothing to judge by: {seen.ended or 'too little time'}."
    stale = not workers["attributes"] if seen.facts.get("own_random") else alone["samples"] and not workers["samples"]
    if stale and (alone["samples"] or alone["attributes"]):
        return (
            ALARM,
            f"Persistent workers do not see set_epoch of {paths}: each keeps its copy from the first epoch.",
            "samples after set_epoch: changed in the main process, unchanged in a worker",
            "Keep the epoch in shared memory (a torch tensor after share_memory_()), or do without persistent_workers.",
        )
    return FINE, f"Persistent workers see set_epoch of {paths}, or it changes no sample."


def last_batch(seen: Evidence):
    if seen.bare:
        return NOT_CHECKED, "A dataset alone has no batches; give its DataLoader."
    if seen.case.streams:
        size = seen.case.loader.batch_size
        return _last_of_streams(seen, size) if size else (FINE, "The dataset makes its own batches.")
    epoch = seen.facts.get("epoch")
    if not epoch or epoch["error"]:
        return NOT_CHECKED, "The indices of an epoch were not read."
    n, size, drop_last = epoch["samples"], epoch["size"], epoch["drop_last"]
    if (sizes := epoch.get("sizes")) is not None:
        batches, most, last = len(sizes), max(sizes, default=0), sizes[-1] if sizes else 0
    elif size:
        batches, most = n // size if drop_last else -(-n // size), min(n, size)
        last = size if drop_last or n % size == 0 else n % size
    else:
        return FINE, "The loader makes no batches."
    if not batches:
        what = f"The loader gives no batch at all: {n:,} samples, batch_size={size}, drop_last={drop_last}."
        return ALARM, what, "0 batches", "Take a smaller batch_size, or drop_last=False."
    figures = f"{batches:,} batches, the last of {last:,}"
    if last == 1 and most > 1:
        what = f"The last batch has one sample ({n:,} samples): BatchNorm fails on it in training."
        return ALARM, what, figures, "For training, drop_last=True; it loses one sample."
    if n == 1 and size and size > 1:
        return FINE, "The only batch has one sample: BatchNorm fails on it in training.", figures
    if last < most:
        return FINE, f"The last batch has {last:,} samples of {most:,}: measure per sample, not per batch.", figures
    lost = n % size if size and drop_last else 0
    return FINE, f"All batches are alike{f'; drop_last leaves out {lost:,} samples' if lost else ''}.", figures


def _last_of_streams(seen: Evidence, size: int):
    crews = seen.crew(crew=seen.case.workers, content=True)
    if not crews or not all(r["ended"] for r in crews[0]["streams"].values()):
        return NOT_CHECKED, "The stream was not read to its end by workers."
    loader = seen.case.loader
    if loader.num_workers:
        counts = [len(r["digests"]) for r in crews[0]["streams"].values()]
    else:
        counts = [len(seen.alone.stream["digests"])]
    if not sum(counts):
        return ALARM, "The loader gives no batch at all: the stream is empty.", "0 samples", "Look at what it reads."
    partial = [n % size for n in counts if n % size]
    figures = f"samples left over, by worker: {', '.join(map(str, partial)) or 'none'}"
    if loader.drop_last:
        lost = sum(partial)
        if not sum(n // size for n in counts):
            what = f"The loader gives no batch at all: no worker has {size:,} samples, and drop_last is on."
            return ALARM, what, figures, "Take a smaller batch_size, or drop_last=False."
        if lost >= size:
            what = f"drop_last drops in every worker: {lost:,} of {sum(counts):,} samples are lost."
            return ALARM, what, figures, "Use drop_last=False, or share out batches instead of samples."
        return FINE, f"drop_last leaves out {lost:,} samples of {len(counts)} workers.", figures
    if 1 in partial and size > 1:
        what = f"{partial.count(1)} batches of an epoch have one sample: BatchNorm fails on them in training."
        return ALARM, what, figures, "For training, drop_last=True; or share the samples out in whole batches."
    if partial:
        what = f"{len(partial)} batches of an epoch are partial, one a worker: measure per sample, not per batch."
        return FINE, what, figures
    return FINE, "All batches are alike.", figures
