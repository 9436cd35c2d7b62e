"""The rules about samples: from what was seen to fine, ALARM or not checked, in words. Nothing is read here."""

from collections import Counter

import numpy as np

from .evidence import Check, Evidence, StreamRead, alarm, fine, unchecked

SHARD = "Give each worker its own part, by torch.utils.data.get_worker_info().id and num_workers, in __iter__."


def hindered(evidence: Evidence) -> Check | None:
    """Why nothing can be said that needs samples from workers."""
    if evidence.devices:
        return unchecked("The samples are no CPU tensors; mend that first.")
    if not evidence.streams and not evidence.keys:
        return unchecked(f"Reading ended: {evidence.ended}." if evidence.ended else "There was no sample to read.")
    if evidence.ended and not evidence.runs:
        return unchecked(f"The workers gave nothing to judge by: {evidence.ended}.")
    return None


def pickling(evidence: Evidence) -> Check:
    if why := evidence.unsendable:
        return alarm(
            f"A worker cannot send a batch to the main process ({why}), and the loop would wait for it for ever.",
            "",
            "Return plain data from the worker: detach() a tensor that has a history, make lists of generators.",
        )
    if evidence.unpicklable is None:
        return unchecked(f"Reading ended: {evidence.ended}.")
    method = evidence.method
    if not evidence.unpicklable:
        return fine(f"Dataset and functions can travel to workers started by {method}, and by any other way.")
    path, kind, words = evidence.unpicklable[0]
    if kind == "main":
        what = f"{words} is defined in the notebook, which a new process cannot import"
        way_out = f"Move {words} to a file and import it."
    else:
        what = f"{path} cannot be pickled: it is {words}"
        way_out = "Use a function or a class of a file (functools.partial for settings); open handles in the worker."
    paths = ", ".join(path for path, _, _ in evidence.unpicklable)
    if method == "fork":
        later = "forkserver, the default from Python 3.14, and under spawn"
        return fine(f"Workers are forked here and inherit all; but {what}, so it would fail under {later}.", paths)
    return alarm(f"Workers are started by {method} here, and {what}.", paths, way_out)


def device(evidence: Evidence) -> Check:
    streams = [read for run in evidence.runs for read in run.streams.values()]
    if evidence.stream is not None:
        streams.append(evidence.stream)
    if evidence.devices is None and evidence.stream is None:
        return unchecked(f"There was no sample to look at{': ' + evidence.ended if evidence.ended else ''}.")
    devices = (evidence.devices or set()).union(evidence.batch_devices, *(read.devices for read in streams))
    if not devices:
        return fine("Samples are made on the CPU.")
    names, default = ", ".join(sorted(devices)), evidence.default_device
    why = f" (torch.set_default_device is {default})" if default != "cpu" else ""
    return alarm(
        f"Samples are made on {names}{why}: forked workers cannot use a GPU, others fill its memory.",
        f"device of a sample: {names}",
        "Return CPU tensors, and move the batch in the training loop, from pinned memory.",
    )


def same_samples(evidence: Evidence) -> Check:
    same = _same_stream if evidence.streams else _same_items
    return _unreadable(evidence) or hindered(evidence) or same(evidence)


def _unreadable(evidence: Evidence) -> Check | None:
    """Samples or batches that cannot be made at all."""
    ended, forked = evidence.ended, evidence.start == "fork"
    if "timed out" in ended or ended == "silent":
        where = f"; it stood at {evidence.where}" if evidence.where else ""
        what = f"No sample came for {evidence.patience_s:g} s{where}."
        if not forked:
            return alarm(what, "", "Look at what it waits for; a larger timeout_s if samples are that slow.")
        return alarm(
            what,
            f"this process had {evidence.threads} threads when its copies were forked",
            'Try multiprocessing_context="forkserver", or start the workers before the threads: a fork copies a '
            "lock that another thread holds, and nobody is left to open it.",
        )
    if "killed by signal" in ended or "exited unexpectedly" in ended:
        way_out = "Read with num_workers=0 to see its words, and look at memory and /dev/shm."
        if not forked:
            way_out += ' A script must start what it runs under if __name__ == "__main__".'
        return alarm(f"A process that read samples died: {ended}.", "", way_out)
    if evidence.read is not None and (errors := evidence.read.errors):
        place, words = next(iter(errors.items()))
        many = f"{len(errors):,} of {evidence.read.done:,} samples cannot be read"
        what = f"{many}; index {evidence.keys[place]!r} raises {words}: an epoch ends there."
        return alarm(what, many, "Mend or leave out what cannot be read; an index that fails stops every epoch.")
    if evidence.stream is not None and (error := evidence.stream.error):
        what = f"The stream breaks off after {len(evidence.stream.digests):,} samples: {error}."
        return alarm(what, "", "Mend or leave out what cannot be read.")
    if error := evidence.collate_error:
        way_out = "Give a collate_fn that takes these samples; default_collate takes tensors, arrays, numbers, strings."
        return alarm(f"A batch cannot be collated: {error}.", "", way_out)
    if ended and not evidence.runs:
        unread = evidence.read is None and evidence.stream is None
        what = "Samples cannot be read" if unread else "Workers fail where this process does not"
        return alarm(f"{what}: {ended}.", "", "Mend what raises it; an epoch would end there.")
    return None


def _same_items(evidence: Evidence) -> Check:
    runs, keys, done = [run for run in evidence.runs if run.compared], evidence.keys, evidence.read.done
    if not runs:
        return unchecked(f"No worker read a sample: {evidence.ended or 'too little time'}.")
    rereadings = evidence.rereadings.values()
    random_here = any(first != second for first, second, *_ in rereadings)
    random_there = any(first != second for *_, first, second in rereadings)
    if random_here or random_there or (evidence.own_random and not rereadings):
        other_form = sorted(set().union(*(run.other_form for run in runs)))
        if other_form and not evidence.own_forms:
            what = f"{len(other_form):,} samples have another shape or type in workers"
            way_out = "Let the shape of a sample depend on its index alone."
            return alarm(f"{what}, index {keys[other_form[0]]!r} first.", "", way_out)
        why = "The samples draw from random generators of their own, so that two readings differ without any worker"
        return unchecked(f"{why}; indices and shapes agree.")
    wrong = {run.workers: run.other_content for run in runs if run.other_content}
    if wrong:
        size, places = max(wrong.items(), key=lambda pair: len(pair[1]))
        differ = f"{len(places):,} of {done:,} samples differ between 0 and {size} workers"
        each = ", ".join(f"{len(places):,} with {n}" for n, places in wrong.items())
        way_out = "Let a sample depend on its index alone: not on the worker, on earlier samples, or on what is shared."
        if evidence.moved_offsets:
            way_out = "Open files once per process, in the worker (see file handles)."
        return alarm(f"{differ}, index {keys[places[0]]!r} first.", f"wrong samples: {each} workers", way_out)
    numbers = sorted({run.workers for run in runs})
    least = min(max(run.compared for run in runs if run.workers == n) for n in numbers)
    first, *more, last = [1 if evidence.by_worker else 0, *numbers]
    counts = f"{', '.join(map(str, [first, *more]))} and {last} workers"
    return fine(
        f"{min(least, done):,} of {evidence.total:,} samples are the same with {counts}.",
        f"{sum(run.compared for run in runs):,} samples compared in workers",
    )


def _same_stream(evidence: Evidence) -> Check:
    whole = evidence.stream
    if not whole.ended:
        return unchecked(f"The stream had not ended after {len(whole.digests):,} samples, so none can be missed.")
    if evidence.own_random:
        return unchecked("The samples draw from random generators of their own: two readings differ without workers.")
    for run in evidence.content_runs:
        for read in run.streams.values():
            if read.error:
                what = f"Worker {read.worker} of {run.workers} breaks off: {read.error}."
                return alarm(what, "", "Mend what depends on the worker.")
        unknown = sum(int((~np.isin(read.digests[1:], whole.digests)).sum()) for read in run.streams.values())
        if unknown:
            return alarm(
                f"{unknown:,} samples of {run.workers} workers are none of those read without workers.",
                f"{unknown:,} of {len(run.digests):,}",
                "Open files in __iter__, once per worker, and let a sample depend on nothing that is shared.",
            )
    return fine(f"All samples of the workers are among the {len(whole.digests):,} that one process reads.")


def lost_or_doubled(evidence: Evidence) -> Check:
    return (hindered(evidence) or _balance_of_stream(evidence)) if evidence.streams else _indices(evidence)


def _indices(evidence: Evidence) -> Check:
    epoch = evidence.epoch
    if epoch is None:
        return unchecked(f"The indices of an epoch were not read: {evidence.ended or 'unknown'}.")
    if epoch.error and evidence.bare:
        return unchecked(f"The dataset alone does not say which indices it has: {epoch.error}.")
    if epoch.error:
        way_out = "Give the dataset a __len__, or the loader a sampler that knows the indices."
        return alarm(f"The sampler fails: {epoch.error}.", "", way_out)
    if epoch.standard:
        return fine(f"A {epoch.standard} of this process gives {epoch.samples:,} indices, to one worker each.")
    return fine(f"The sampler runs in this process: {epoch.distinct:,} different indices among {epoch.read:,} read.")


def _balance_of_stream(evidence: Evidence) -> Check:
    whole = evidence.stream
    n = len(whole.digests)
    for run in evidence.content_runs:
        reads = list(run.streams.values())
        got = len(run.digests)
        if whole.error:
            return unchecked(f"The stream breaks off: {whole.error}.")
        if not (whole.ended and all(read.ended for read in reads)):
            if twice := _shared_start(reads):
                came = f"{twice:,} of the first {got:,} came more than once"
                return alarm(f"{run.workers} workers read the same samples: {came}.", f"{twice:,} doubled", SHARD)
            continue
        if evidence.own_random:
            lost, doubled = max(0, n - got), max(0, got - n)
        else:
            lost, doubled = _balance(whole.digests, run.digests)
            lost -= sum(int(not np.isin(read.digests[:1], whole.digests).all()) for read in reads)  # random firsts
        if doubled:
            what = f"{run.workers} workers give {got:,} samples where there are {n:,}: {doubled:,} too many."
            return alarm(what, f"{doubled:,} doubled, {lost:,} lost", SHARD)
        if lost:
            what = f"{run.workers} workers lose {lost:,} of {n:,} samples."
            way_out = "Share the samples out so that the parts cover all: range(id, n, num_workers)."
            return alarm(what, f"{lost:,} lost", way_out)
    if not whole.ended:
        return unchecked("No two workers read the same; whether any is lost, an unended stream does not tell.")
    sizes = " and ".join(str(run.workers) for run in evidence.content_runs)
    return fine(f"Each of {n:,} samples comes once with {sizes} workers.")


def _balance(whole: np.ndarray, got: np.ndarray) -> tuple[int, int]:
    """How many of the known samples are missing, and how many come too often."""
    wanted, came = Counter(whole.tolist()), Counter(got.tolist())
    known = Counter({digest: came[digest] for digest in wanted})
    return (wanted - known).total(), (known - wanted).total()


def _shared_start(reads: list[StreamRead]) -> int:
    """Samples that several workers read, those left out that one worker alone reads twice."""
    counts = [Counter(read.digests.tolist()) for read in reads]
    repeated = {digest for count in counts for digest, n in count.items() if n > 1}
    parts = [count.keys() - repeated for count in counts]
    twice = sum(n - 1 for n in Counter(digest for part in parts for digest in part).values())
    return twice if twice >= 0.5 * sum(len(part) for part in parts[1:]) else 0
