"""The rules about what workers hold: files, memory, threads, descriptors. Nothing is read here."""

import torch.multiprocessing

from perflab.bench import machine
from perflab.bench.units import quantity

from .rules_samples import ALARM, FINE, NOT_CHECKED, Evidence, hindered

PILE_OBJECTS, PILE_BYTES = 100_000, 8 * 2**20
GROWTH_BYTES = 8 * 2**20  # that a worker must have gained before growth is taken for more than noise
FEW_DESCRIPTORS = 512  # a soft limit below it is unusual; 1,024 is the least that Linux systems set
BUSY_SHARE, BUSY_NS = 0.25, 20_000_000  # of the busiest thread's CPU time, and in all: a thread that works


def file_handles(seen: Evidence):
    if reason := hindered(seen):
        return reason
    if not seen.crews:
        return NOT_CHECKED, f"No worker read a sample: {seen.ended}."
    lazily = "Open it lazily, once per process: keep the path, and open where os.getpid() is new. Or read by os.pread."
    named = {fd: path for path, fd in seen.facts.get("open", {}).items()}
    if moved := seen.facts.get("moved_offsets"):
        fd, file = next(iter(moved.items()))
        what = named.get(fd, f"descriptor {fd}")
        return (
            ALARM,
            f"Workers read {what} ({file}) through one shared offset: each moves it under the others' feet.",
            f"the offset here moved while workers read: {', '.join(named.get(f, n) for f, n in moved.items())}",
            lazily,
        )
    handles = seen.facts.get("handles", {})
    censuses = [c for crew in seen.crews for counted in crew["census"].values() for c in counted[-1:]]
    if seen.case.start == "fork":
        for path, (where, kind) in handles.items():
            if any(c["open"].get(path) == where for c in censuses):
                what = f"{path} ({kind}) was opened before the fork, and workers keep using it."
                return (
                    ALARM,
                    what,
                    path,
                    f"{lazily.partition(':')[0]} (its library forbids use on both sides of a fork).",
                )
    carried = [*named.values(), *(path for path in handles if path not in named.values())]
    if carried and seen.case.start == "fork":
        return FINE, f"{', '.join(carried)} is open here, and workers move no offset that they share."
    return FINE, "The dataset carries no open file into its workers."


def memory_growth(seen: Evidence):
    piles = seen.facts.get("piles", {})
    objects, size = (sum(pile[i] for pile in piles.values()) for i in (0, 1))
    crew = next((c for c in seen.crews if c["census"] and not c.get("content", False)), None) or next(
        (c for c in seen.crews if c["census"]), None
    )
    counted = [c for c in crew["census"].values() if len(c) >= 2] if crew else []
    if leak := _leak(seen, crew, counted):
        return leak
    gained = max((c[1]["private_bytes"] - c[0]["private_bytes"] for c in counted), default=0)
    figures = f"a worker gained {quantity(max(0, gained), 'bytes')} of private memory while it read" if counted else ""
    if objects >= PILE_OBJECTS and size >= PILE_BYTES:
        path = max(piles, key=lambda p: piles[p][1])
        forked = seen.case.method == "fork"
        how = (
            "touching an object writes its reference count, so each copies it bit by bit"
            if forked
            else ("each unpickles a copy of its own")
        )
        return (
            ALARM,
            f"{path} is {piles[path][0]:,} Python objects, {quantity(size, 'bytes')} in all, and "
            f"{seen.workers} workers end with {seen.workers} copies: {how}.",
            figures,
            "Pack it into one numpy array or tensor (strings: bytes and offsets), whose pages stay shared.",
        )
    if not counted:
        return hindered(seen) or (NOT_CHECKED, f"No worker read long enough: {seen.ended or 'too little time'}.")
    return _unbounded(seen, crew, gained, figures) or (FINE, "Workers keep to their size.", figures)


def _leak(seen: Evidence, crew, counted: list[list[dict]]):
    """What grows with every reading of the same samples grows for ever."""
    reads = crew["again"] / max(1, 2 * len(counted)) if crew else 0
    for c in counted:
        if len(c) < 4 or reads < 4:
            continue
        grown = {
            path: c[3]["lengths"][path] - c[2]["lengths"][path]
            for path in c[3]["lengths"].keys() & c[2]["lengths"].keys()
            if min(c[k + 1]["lengths"][path] - c[k]["lengths"].get(path, 0) for k in (1, 2)) >= 0.5 * reads
        }
        if grown:
            path = max(grown, key=grown.__getitem__)
            what = f"{path} grows with every sample that a worker reads, the same ones again too."
            figures = f"{grown[path]:,} more members after {reads:,.0f} reads"
            return ALARM, what, figures, "Keep nothing in the dataset, or bound it (collections.deque(maxlen=...))."
        more = [c[k + 1]["private_bytes"] - c[k]["private_bytes"] for k in (1, 2)]
        if min(more) >= GROWTH_BYTES:
            each = quantity(min(more) / reads, "bytes")
            what = f"A worker's private memory grows by {each} with each sample read, the same ones again too."
            return (
                ALARM,
                what,
                f"{quantity(sum(more), 'bytes')} in {2 * reads:,.0f} reads",
                "Find what keeps the samples.",
            )
    return None


def _unbounded(seen: Evidence, crew: dict, gained: int, figures: str):
    """A cache whose end is beyond memory: growth of a sample times the samples of the dataset times the workers."""
    read = crew["compared"] / max(1, crew["crew"])
    if seen.case.streams or gained < GROWTH_BYTES or read < 16:
        return None
    whole = gained / read * seen.alone.total * seen.workers
    if whole < machine.ram_bytes():
        return None
    what = (
        f"A worker keeps {quantity(gained / read, 'bytes')} of each sample; {seen.alone.total:,} samples in "
        f"{seen.workers} workers would need {quantity(whole, 'bytes')}."
    )
    return ALARM, what, figures, "Bound the cache, or share one between the workers (a file, a memory map)."


def threads(seen: Evidence):
    if reason := hindered(seen):
        return reason
    counted = [c for crew in seen.crews for c in crew["census"].values() if c]
    if not counted:
        return NOT_CHECKED, f"No worker was counted: {seen.ended or 'too little time'}."
    asked = max(c[-1]["threads"] for c in counted)
    busy = max(_busy(c[0]["busy_ns"], c[-1]["busy_ns"]) for c in counted)
    at_once = max(crew["at_once"] for crew in seen.crews)
    each, cores = max(asked, busy, at_once), machine.cores()
    figures = f"{each} thread{'s' * (each > 1)} a worker x {seen.workers} workers, {cores} cores"
    if each > 1 and each * seen.workers > cores:
        return (
            ALARM,
            f"{each} threads a worker: {seen.workers} workers run {each * seen.workers} threads on {cores} cores.",
            figures,
            "One thread a worker: leave torch.set_num_threads alone, set OMP_NUM_THREADS=1, cv2.setNumThreads(0).",
        )
    return FINE, "One thread a worker." if each == 1 else f"{each} threads a worker fit the cores.", figures


def _busy(before: dict[int, int], after: dict[int, int]) -> int:
    """Threads that really worked between two counts."""
    spent = sorted((ns - before.get(task, 0) for task, ns in after.items()), reverse=True)
    return sum(1 for ns in spent if ns >= max(BUSY_NS, BUSY_SHARE * spent[0])) if spent else 1


def descriptors(seen: Evidence):
    """Who keeps a tensor that a worker sent keeps a descriptor open with it.

    A loop is not seen from its loader, so that one which would keep an epoch's batches is an alarm only where
    few may be open at all; otherwise what is kept must be seen: in this process, in the loader's own
    iteration, in `step`, or in a worker.
    """
    loader, limit, left = seen.case.loader, seen.fd_limit, seen.fd_limit - seen.fds
    by_file = torch.multiprocessing.get_sharing_strategy() != "file_descriptor"
    clone = "Keep copies (batch.clone(), numbers), not the tensors that workers sent, and let batches go."
    if seen.kept and seen.kept >= 0.25 * limit:
        what = f"This process keeps {seen.kept:,} tensors that workers sent, each with an open descriptor."
        return ALARM, what, f"{seen.kept:,} of the {limit:,} descriptors that may be open", clone
    if reason := hindered(seen):
        return reason
    held = seen.facts.get("held", [])
    grown = _slope(held)
    if grown >= 0.5:
        full = f"{left / grown:,.0f} batches fill the limit"
        what = f"Each batch leaves {grown:.1f} descriptors open after it was let go: {full}."
        return ALARM, what, f"{held[0]:,} to {held[-1]:,} open after {len(held)} batches", clone
    if error := seen.facts.get("step_error"):
        return NOT_CHECKED, f"The loop's step or the loader's own iteration fails: {error}."
    if leak := _worker_leak(seen):
        return leak
    if "batch_tensors" not in seen.facts:
        return NOT_CHECKED, f"No batch was made: {seen.ended or 'there was no sample'}."
    tensors = max([seen.facts["batch_tensors"], *seen.facts.get("tensors", [])])
    flight = (loader.prefetch_factor or 2) * seen.workers
    if by_file or not tensors:
        return FINE, "Batches take no descriptors of this process.", f"{tensors:,} tensors a batch"
    if tensors * (flight + 1) > left:
        return (
            ALARM,
            f"A batch is {tensors:,} separate tensors, each with a descriptor: {flight + 1} batches in flight and "
            f"in use need {tensors * (flight + 1):,} where {left:,} are left.",
            f"{tensors:,} tensors a batch, {flight} batches in flight",
            "Return one array or tensor a field from the dataset, not lists of numbers.",
        )
    figures = f"{tensors:,} tensors a batch; {limit:,} descriptors may be open"
    kept = max(1, left // tensors)
    if limit < FEW_DESCRIPTORS and kept < _batches(seen):
        what = f"Only {limit:,} descriptors may be open: a loop that keeps its batches stops at {kept:,} of them."
        return ALARM, what, figures, f"{clone} Or raise the limit (ulimit -n 4096)."
    return FINE, f"A loop that lets its batches go needs few; one that keeps them stops at {kept:,} batches.", figures


def _batches(seen: Evidence) -> float:
    """Batches of an epoch, as far as known."""
    if seen.case.streams:
        return len(seen.alone.stream.get("digests", ())) / (seen.case.loader.batch_size or 1)
    epoch = seen.facts.get("epoch", {})
    return len(epoch["sizes"]) if epoch.get("sizes") else epoch.get("samples", 0) / (epoch.get("size") or 1)


def _slope(held: list[int]) -> float:
    """Descriptors more for each batch, over the second half of the batches; 0 for fewer than eight."""
    if len(held) < 8:
        return 0.0
    half = held[len(held) // 2 :]
    return (half[-1] - half[0]) / (len(half) - 1)


def _worker_leak(seen: Evidence):
    """Does a worker open something for each sample and never close it?"""
    for crew in seen.crews:
        counted = [c for c in crew["census"].values() if len(c) >= 4]
        reads = crew["again"] / max(1, 2 * len(counted))
        for c in counted:
            if reads >= 4 and min(c[k + 1]["fds"] - c[k]["fds"] for k in (1, 2)) >= 0.5 * reads:
                what = "Each sample leaves a descriptor open in its worker."
                figures = f"{c[3]['fds'] - c[1]['fds']:,} more after {2 * reads:,.0f} reads"
                return ALARM, what, figures, "Close what a sample opens (with open(...) as file), or keep one open."
    return None
