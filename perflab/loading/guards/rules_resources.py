"""The rules about what workers hold: files, memory, threads, descriptors. Nothing is read here."""

import resource

import torch.multiprocessing

from perflab.bench import machine
from perflab.bench.units import quantity

from .evidence import Check, Evidence, WorkerRun, alarm, fine, unchecked
from .resources import Census
from .rules_samples import hindered

PILE_OBJECTS, PILE_BYTES = 100_000, 8 * 2**20
GROWTH_BYTES = 8 * 2**20  # that a worker must have gained before growth is taken for more than noise
FEW_DESCRIPTORS = 512  # a soft limit below it is unusual; 1,024 is the least that Linux systems set
BUSY_SHARE, BUSY_NS = 0.25, 20_000_000  # of the busiest thread's CPU time, and in all: a thread that works
LAZILY = "Open it lazily, once per process"
CLONE = "Keep copies (batch.clone(), numbers), not the tensors that workers sent, and let batches go."


def file_handles(evidence: Evidence) -> Check:
    if reason := hindered(evidence):
        return reason
    if not evidence.runs:
        return unchecked(f"No worker read a sample: {evidence.ended}.")
    named = {fd: path for path, fd in evidence.open_files.items()}
    if moved := evidence.moved_offsets:
        fd, file = next(iter(moved.items()))
        what = f"{named.get(fd, f'descriptor {fd}')} ({file})"
        return alarm(
            f"Workers read {what} through one shared offset: each moves it under the others' feet.",
            f"the offset here moved while workers read: {', '.join(named.get(fd, n) for fd, n in moved.items())}",
            f"{LAZILY}: keep the path, and open where os.getpid() is new. Or read by os.pread.",
        )
    if evidence.start == "fork":
        last = [counted[-1].handles for run in evidence.runs for counted in run.census.values()]
        for path, (handle, kind) in evidence.handles.items():
            if any(handles.get(path) == handle for handles in last):
                what = f"{path} ({kind}) was opened before the fork, and workers keep using it."
                return alarm(what, path, f"{LAZILY} (its library forbids use on both sides of a fork).")
        if carried := list(dict.fromkeys([*evidence.open_files, *evidence.handles])):
            return fine(f"{', '.join(carried)} is open here, and workers move no offset that they share.")
    return fine("The dataset carries no open file into its workers.")


def memory_growth(evidence: Evidence) -> Check:
    piles = evidence.long_containers
    objects, size = (sum(pile[i] for pile in piles.values()) for i in (0, 1))
    counting = sorted((run for run in evidence.runs if run.census), key=lambda run: run.content)
    run = counting[0] if counting else WorkerRun(1)
    counted = [census for census in run.census.values() if len(census) >= 2]
    if leak := _leak(run, counted):
        return leak
    gained = max((after.private_bytes - before.private_bytes for before, after, *_ in counted), default=0)
    figures = f"a worker gained {quantity(max(0, gained), 'bytes')} of private memory while it read" if counted else ""
    if objects >= PILE_OBJECTS and size >= PILE_BYTES:
        path = max(piles, key=lambda p: piles[p][1])
        how = "each unpickles a copy of its own"
        if evidence.method == "fork":
            how = "touching an object writes its reference count, so each copies it bit by bit"
        return alarm(
            f"{path} is {piles[path][0]:,} Python objects, {quantity(size, 'bytes')} in all, and "
            f"{evidence.workers} workers end with {evidence.workers} copies: {how}.",
            figures,
            "Pack it into one numpy array or tensor (strings: bytes and offsets), whose pages stay shared.",
        )
    if not counted:
        return hindered(evidence) or unchecked(f"No worker read long enough: {evidence.ended or 'too little time'}.")
    return _unbounded(evidence, run, gained, figures) or fine("Workers keep to their size.", figures)


def _leak(run: WorkerRun, counted: list[list[Census]]) -> Check | None:
    """What grows with every reading of the same samples grows for ever."""
    reads = run.rereads / max(1, 2 * len(counted))
    for census in counted:
        if len(census) < 4 or reads < 4:
            continue
        before, between, after = census[1:4]
        grown = {
            path: n - between.lengths[path]
            for path, n in after.lengths.items()
            if path in between.lengths
            and min(n - between.lengths[path], between.lengths[path] - before.lengths.get(path, 0)) >= 0.5 * reads
        }
        if grown:
            path = max(grown, key=grown.__getitem__)
            what = f"{path} grows with every sample that a worker reads, the same ones again too."
            way_out = "Keep nothing in the dataset, or bound it (collections.deque(maxlen=...))."
            return alarm(what, f"{grown[path]:,} more members after {reads:,.0f} reads", way_out)
        least = min(b.private_bytes - a.private_bytes for a, b in ((before, between), (between, after)))
        if least >= GROWTH_BYTES:
            each = quantity(least / reads, "bytes")
            return alarm(
                f"A worker's private memory grows by {each} with each sample read, the same ones again too.",
                f"{quantity(after.private_bytes - before.private_bytes, 'bytes')} in {2 * reads:,.0f} reads",
                "Find what keeps the samples.",
            )
    return None


def _unbounded(evidence: Evidence, run: WorkerRun, gained: int, figures: str) -> Check | None:
    """A cache whose end is beyond memory: growth of a sample times the samples of the dataset times the workers."""
    read = run.compared / run.workers
    if evidence.streams or gained < GROWTH_BYTES or read < 16:
        return None
    whole = gained / read * evidence.total * evidence.workers
    if whole < machine.ram_bytes():
        return None
    what = (
        f"A worker keeps {quantity(gained / read, 'bytes')} of each sample; {evidence.total:,} samples in "
        f"{evidence.workers} workers would need {quantity(whole, 'bytes')}."
    )
    return alarm(what, figures, "Bound the cache, or share one between the workers (a file, a memory map).")


def threads(evidence: Evidence) -> Check:
    if reason := hindered(evidence):
        return reason
    counted = [census for run in evidence.runs for census in run.census.values()]
    if not counted:
        return unchecked(f"No worker was counted: {evidence.ended or 'too little time'}.")
    asked = max(census[-1].threads for census in counted)
    busy = max(_busy_threads(census[0].busy_ns, census[-1].busy_ns) for census in counted)
    each = max(asked, busy, *(run.threads_running for run in evidence.runs))
    workers, cores = evidence.workers, machine.cores()
    figures = f"{each} thread{'s' if each > 1 else ''} a worker x {workers} workers, {cores} cores"
    if each > 1 and each * workers > cores:
        return alarm(
            f"{each} threads a worker: {workers} workers run {each * workers} threads on {cores} cores.",
            figures,
            "One thread a worker: leave torch.set_num_threads alone, set OMP_NUM_THREADS=1, cv2.setNumThreads(0).",
        )
    return fine("One thread a worker." if each == 1 else f"{each} threads a worker fit the cores.", figures)


def _busy_threads(before: dict[int, int], after: dict[int, int]) -> int:
    """Threads that really worked between two counts."""
    spent = [ns - before.get(task, 0) for task, ns in after.items()]
    return sum(ns >= max(BUSY_NS, BUSY_SHARE * max(spent)) for ns in spent) if spent else 1


def descriptors(evidence: Evidence) -> Check:
    """Who keeps a tensor that a worker sent keeps a descriptor open with it.

    A loop is not seen from its loader, so that one which would keep an epoch's batches is an alarm only where
    few may be open at all; otherwise what is kept must be seen: in this process, in the loader's own
    iteration, in `step`, or in a worker.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = limit - len(evidence.descriptors)
    kept = sum(name.startswith("torch_") for name in evidence.descriptors.values())  # memory of workers' tensors
    if kept and kept >= 0.25 * limit:
        what = f"This process keeps {kept:,} tensors that workers sent, each with an open descriptor."
        return alarm(what, f"{kept:,} of the {limit:,} descriptors that may be open", CLONE)
    if reason := hindered(evidence):
        return reason
    fds = evidence.fds_by_batch
    grown = _slope(fds)
    if grown >= 0.5:
        full = f"{left / grown:,.0f} batches fill the limit"
        what = f"Each batch leaves {grown:.1f} descriptors open after it was let go: {full}."
        return alarm(what, f"{fds[0]:,} to {fds[-1]:,} open after {len(fds)} batches", CLONE)
    if error := evidence.step_error:
        return unchecked(f"The loop's step or the loader's own iteration fails: {error}.")
    if leak := _worker_leak(evidence):
        return leak
    if evidence.batch_tensors is None:
        return unchecked(f"No batch was made: {evidence.ended or 'there was no sample'}.")
    return _descriptors_in_flight(evidence, max([evidence.batch_tensors, *evidence.tensors_by_batch]), limit, left)


def _descriptors_in_flight(evidence: Evidence, tensors: int, limit: int, left: int) -> Check:
    flight = (evidence.loader.prefetch_factor or 2) * evidence.workers
    if not tensors or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return fine("Batches take no descriptors of this process.", f"{tensors:,} tensors a batch")
    needed = tensors * (flight + 1)
    if needed > left:
        return alarm(
            f"A batch is {tensors:,} separate tensors, each with a descriptor: {flight + 1} batches in flight and "
            f"in use need {needed:,} where {left:,} are left.",
            f"{tensors:,} tensors a batch, {flight} batches in flight",
            "Return one array or tensor a field from the dataset, not lists of numbers.",
        )
    figures = f"{tensors:,} tensors a batch; {limit:,} descriptors may be open"
    kept = max(1, left // tensors)
    if limit < FEW_DESCRIPTORS and kept < _batches(evidence):
        few = f"Only {limit:,} descriptors may be open"
        what = f"{few}: a loop that keeps its batches stops at {kept:,} of them."
        return alarm(what, figures, f"{CLONE} Or raise the limit (ulimit -n 4096).")
    return fine(f"A loop that lets its batches go needs few; one that keeps them stops at {kept:,} batches.", figures)


def _batches(evidence: Evidence) -> float:
    """Batches of an epoch, as far as known."""
    if evidence.streams:
        return len(evidence.stream.digests) / (evidence.loader.batch_size or 1)
    epoch = evidence.epoch
    return len(epoch.sizes) if epoch.sizes else epoch.samples / (epoch.size or 1)


def _slope(fds: list[int]) -> float:
    """Descriptors more for each batch, over the second half of the batches; 0 for fewer than eight."""
    half = fds[len(fds) // 2 :]
    return (half[-1] - half[0]) / (len(half) - 1) if len(fds) >= 8 else 0.0


def _worker_leak(evidence: Evidence) -> Check | None:
    """Does a worker open something for each sample and never close it?"""
    for run in evidence.runs:
        counted = [census for census in run.census.values() if len(census) >= 4]
        reads = run.rereads / max(1, 2 * len(counted))
        for _, before, between, after, *_ in counted:
            if reads >= 4 and min(between.fds - before.fds, after.fds - between.fds) >= 0.5 * reads:
                figures = f"{after.fds - before.fds:,} more after {2 * reads:,.0f} reads"
                way_out = "Close what a sample opens (with open(...) as file), or keep one open."
                return alarm("Each sample leaves a descriptor open in its worker.", figures, way_out)
    return None
