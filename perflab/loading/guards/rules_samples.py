"""The rules about samples: from what was seen to fine, ALARM or not checked, in words. Nothing is read here."""

from dataclasses import dataclass, field

import numpy as np

from .case import Alone, Case
from .digest import SOURCES

FINE, ALARM, NOT_CHECKED = "fine", "ALARM", "not checked"


@dataclass(frozen=True)
class Check:
    """What one guard found: `state` is "fine", "ALARM" or "not checked" (then `what` is the reason)."""

    guard: str
    state: str
    what: str
    seen: str = ""
    way_out: str = ""

    def __repr__(self):
        return f"{self.guard}: {self.state}"

    def __str__(self):
        more = "".join(f" {part}" for part in (self.seen and f"Seen: {self.seen}.", self.way_out) if part)
        return f"{self.guard}: {self.state}. {self.what}{more}"


@dataclass
class Evidence:
    """All that was seen of one loader."""

    case: Case
    alone: Alone
    bare: bool  # a dataset was given, without a loader
    facts: dict = field(default_factory=dict)
    crews: list[dict] = field(default_factory=list)
    verified: dict = field(default_factory=dict)
    ended: str = ""  # why reading in workers, or at all, came to no end
    where: str = ""
    threads: int = 1  # of the learner's process
    fds: int = 0
    fd_limit: int = 0
    kept: int = 0  # descriptors of workers' tensors that the learner's process holds

    @property
    def workers(self) -> int:
        return self.case.loader.num_workers or self.case.workers

    def crew(self, **wanted) -> list[dict]:
        return [c for c in self.crews if all(c.get(k) == v for k, v in wanted.items())]


def hindered(seen: Evidence) -> tuple[str, str] | None:
    """Why nothing can be said that needs samples from workers."""
    if seen.facts.get("devices"):
        return NOT_CHECKED, "The samples are no CPU tensors; mend that first."
    if not seen.case.streams and not seen.alone.keys:
        return NOT_CHECKED, "There was no sample to read." if not seen.ended else f"Reading ended: {seen.ended}."
    if seen.ended and not seen.crews:
        return NOT_CHECKED, f"The workers gave nothing to judge by: {seen.ended}."
    return None


def pickling(seen: Evidence):
    if why := seen.facts.get("unsendable"):
        what = f"A worker cannot send a batch to the main process ({why}), and the loop would wait for it for ever."
        return (
            ALARM,
            what,
            "",
            "Return plain data from the worker: detach() a tensor that has a history, make lists of generators.",
        )
    found, method = seen.facts.get("pickling"), seen.case.method
    if found is None:
        return NOT_CHECKED, f"Reading ended: {seen.ended}."
    if not found:
        return FINE, f"Dataset and functions can travel to workers started by {method}, and by any other way."
    path, kind, words = found[0]
    if kind == "main":
        what = f"{words} is defined in the notebook, which a new process cannot import"
        way_out = f"Move {words} to a file and import it."
    else:
        what = f"{path} cannot be pickled: it is {words}"
        way_out = (
            "Use a function or a class of a file (functools.partial for settings), and open handles in the worker."
        )
    figures = ", ".join(p for p, _, _ in found)
    if method == "fork":
        later = "forkserver, the default from Python 3.14, and under spawn"
        return FINE, f"Workers are forked here and inherit all; but {what}, so it would fail under {later}.", figures
    return ALARM, f"Workers are started by {method} here, and {what}.", figures, way_out


def device(seen: Evidence):
    found = sorted({*seen.facts.get("devices", ()), *seen.facts.get("devices_batch", ())})
    for crew in seen.crews:
        found += sorted(set().union(*(s.get("devices", ()) for s in crew.get("streams", {}).values())) - set(found))
    found += sorted(set(seen.facts.get("stream stream", {}).get("devices", ())) - set(found))
    default = seen.facts.get("default_device", "cpu")
    if found:
        why = f" (torch.set_default_device is {default})" if default != "cpu" else ""
        return (
            ALARM,
            f"Samples are made on {', '.join(found)}{why}: forked workers cannot use a GPU, others fill its memory.",
            f"device of a sample: {', '.join(found)}",
            "Return CPU tensors, and move the batch in the training loop, from pinned memory.",
        )
    if "devices" not in seen.facts and "stream stream" not in seen.facts:
        return NOT_CHECKED, f"There was no sample to look at{': ' + seen.ended if seen.ended else ''}."
    return FINE, "Samples are made on the CPU."


def same_samples(seen: Evidence):
    if early := _unreadable(seen):
        return early
    if reason := hindered(seen):
        return reason
    return _same_stream(seen) if seen.case.streams else _same_items(seen)


def _unreadable(seen: Evidence):
    """Samples or batches that cannot be made at all."""
    case = seen.case
    if "timed out" in seen.ended or seen.ended == "silent":
        where = f"; it stood at {seen.where}" if seen.where else ""
        what = f"No sample came for {case.timeout_s:g} s{where}."
        if case.start != "fork":
            return ALARM, what, "", "Look at what it waits for; a larger timeout_s if samples are that slow."
        return (
            ALARM,
            what,
            f"this process had {seen.threads} threads when its copies were forked",
            'Try multiprocessing_context="forkserver", or start the workers before the threads: a fork copies a '
            "lock that another thread holds, and nobody is left to open it.",
        )
    if "killed by signal" in seen.ended or "exited unexpectedly" in seen.ended:
        way_out = "Read with num_workers=0 to see its words, and look at memory and /dev/shm."
        if case.start != "fork":
            way_out = f'{way_out} A script must start what it runs under if __name__ == "__main__".'
        return ALARM, f"A process that read samples died: {seen.ended}.", "", way_out
    if seen.alone.seen is not None and (errors := seen.alone.seen.errors):
        k, words = next(iter(errors.items()))
        many = f"{len(errors):,} of {seen.alone.seen.done:,} samples cannot be read"
        what = f"{many}; index {seen.alone.keys[k]!r} raises {words}: an epoch ends there."
        return ALARM, what, many, "Mend or leave out what cannot be read; an index that fails stops every epoch."
    error = seen.facts.get("stream stream", {}).get("error")
    if error:
        way_out = "Mend or leave out what cannot be read."
        return (
            ALARM,
            f"The stream breaks off after {len(seen.alone.stream['digests']):,} samples: {error}.",
            "",
            way_out,
        )
    if error := seen.facts.get("collate_error"):
        way_out = "Give a collate_fn that takes these samples; default_collate takes tensors, arrays, numbers, strings."
        return ALARM, f"A batch cannot be collated: {error}.", "", way_out
    way_out = "Mend what raises it; an epoch would end there."
    if seen.ended and seen.alone.seen is None and not seen.alone.stream:
        return ALARM, f"Samples cannot be read: {seen.ended}.", "", way_out
    if seen.ended and not seen.crews:
        return ALARM, f"Workers fail where this process does not: {seen.ended}.", "", way_out
    return None


def _same_items(seen: Evidence):
    alone = seen.alone
    crews = [c for c in seen.crews if c["compared"]]
    if not crews:
        return NOT_CHECKED, f"No worker read a sample: {seen.ended or 'too little time'}."
    least = min(max(c["compared"] for c in crews if c["crew"] == n) for n in {c["crew"] for c in crews})
    many = f"{min(least, alone.seen.done):,} of {alone.total:,} samples"
    sizes = [1 if seen.facts.get("by_worker") else 0, *sorted({c["crew"] for c in crews})]
    counts = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} workers"
    if any(a != b or c != d for a, b, c, d in seen.verified.values()) or (alone.own_random and not seen.verified):
        strange = sorted(set().union(*(c["strange"] for c in crews)))
        if strange and not seen.facts.get("own_forms"):
            first = f"index {alone.keys[strange[0]]!r} first"
            what = f"{len(strange):,} samples have another shape or type in workers, {first}."
            return ALARM, what, "", "Let the shape of a sample depend on its index alone."
        why = "The samples draw from random generators of their own, so that two readings differ without any worker"
        return NOT_CHECKED, f"{why}; indices and shapes agree."
    wrong = {c["crew"]: c["wrong"] for c in crews if c["wrong"]}
    if wrong:
        size, places = max(wrong.items(), key=lambda pair: len(pair[1]))
        key = alone.keys[places[0]]
        what = (
            f"{len(places):,} of {alone.seen.done:,} samples differ between 0 and {size} workers, index {key!r} first."
        )
        each = ", ".join(f"{len(p):,} with {n}" for n, p in wrong.items())
        way_out = "Let a sample depend on its index alone: not on the worker, on earlier samples, or on what is shared."
        if seen.facts.get("moved_offsets"):
            way_out = "Open files once per process, in the worker (see file handles)."
        return ALARM, what, f"wrong samples: {each} workers", way_out
    rounds = sum(c["compared"] for c in crews)
    return FINE, f"{many} are the same with {counts}.", f"{rounds:,} samples compared in workers"


def _same_stream(seen: Evidence):
    whole = seen.alone.stream
    if not whole["ended"]:
        return NOT_CHECKED, f"The stream had not ended after {len(whole['digests']):,} samples, so none can be missed."
    if seen.facts.get("own_random"):
        return NOT_CHECKED, "The samples draw from random generators of their own: two readings differ without workers."
    known = np.unique(whole["digests"])
    for crew in seen.crew(content=True):
        for read in crew["streams"].values():
            if read["error"]:
                what = f"Worker {read['id']} of {crew['crew']} breaks off: {read['error']}."
                return ALARM, what, "", "Mend what depends on the worker."
        strange = sum(int((~np.isin(read["digests"][1:], known)).sum()) for read in crew["streams"].values())
        if strange:
            what = f"{strange:,} samples of {crew['crew']} workers are none of those read without workers."
            way_out = "Open files in __iter__, once per worker, and let a sample depend on nothing that is shared."
            return ALARM, what, f"{strange:,} of {len(_all(crew)):,}", way_out
    return FINE, f"All samples of the workers are among the {len(whole['digests']):,} that one process reads."


def own_generator_decides(seen: Evidence) -> bool:
    """Do workers give samples that are new here, while a generator of the stream's own moves on between samples?"""
    known = seen.alone.stream["digests"]
    for crew in seen.crew(content=True):
        for read in crew["streams"].values():
            own = [name for name in read["moved"] if name not in SOURCES]
            if own and not np.isin(read["digests"][1:], known).all():
                return True
    return False


def _all(crew: dict) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint64), *(read["digests"] for read in crew["streams"].values())])


def lost_or_doubled(seen: Evidence):
    if not seen.case.streams:
        epoch = seen.facts.get("epoch")
        if not epoch:
            return NOT_CHECKED, f"The indices of an epoch were not read: {seen.ended or 'unknown'}."
        if epoch["error"] and seen.bare:
            return NOT_CHECKED, f"The dataset alone does not say which indices it has: {epoch['error']}."
        if epoch["error"]:
            way_out = "Give the dataset a __len__, or the loader a sampler that knows the indices."
            return ALARM, f"The sampler fails: {epoch['error']}.", "", way_out
        if epoch["standard"]:
            return (
                FINE,
                f"A {epoch['standard']} of this process gives {epoch['samples']:,} indices, to one worker each.",
            )
        what = (
            f"The sampler runs in this process: {epoch['distinct']:,} different indices among {epoch['read']:,} read."
        )
        return FINE, what
    if reason := hindered(seen):
        return reason
    whole = seen.alone.stream
    shard = "Give each worker its own part, by torch.utils.data.get_worker_info().id and num_workers, in __iter__."
    for crew in seen.crew(content=True):
        got, n = _all(crew), crew["crew"]
        reads = list(crew["streams"].values())
        if whole["error"]:
            return NOT_CHECKED, f"The stream breaks off: {whole['error']}."
        if not (whole["ended"] and all(read["ended"] for read in reads)):
            if twice := _shared_start(reads):
                what = f"{n} workers read the same samples: {twice:,} of the first {len(got):,} came more than once."
                return ALARM, what, f"{twice:,} doubled", shard
            continue
        lost, doubled = _balance(whole["digests"], got)
        lost -= sum(int(not np.isin(read["digests"][:1], whole["digests"]).all()) for read in reads)  # random firsts
        if seen.facts.get("own_random"):
            lost, doubled = max(0, len(whole["digests"]) - len(got)), max(0, len(got) - len(whole["digests"]))
        if doubled:
            there = f"where there are {len(whole['digests']):,}"
            what = f"{n} workers give {len(got):,} samples {there}: {doubled:,} too many."
            return ALARM, what, f"{doubled:,} doubled, {lost:,} lost", shard
        if lost:
            what = f"{n} workers lose {lost:,} of {len(whole['digests']):,} samples."
            return (
                ALARM,
                what,
                f"{lost:,} lost",
                "Share the samples out so that the parts cover all: range(id, n, num_workers).",
            )
    if not whole["ended"]:
        return NOT_CHECKED, "No two workers read the same; whether any is lost, an unended stream does not tell."
    sizes = " and ".join(str(c["crew"]) for c in seen.crew(content=True))
    return FINE, f"Each of {len(whole['digests']):,} samples comes once with {sizes} workers."


def _balance(whole: np.ndarray, got: np.ndarray) -> tuple[int, int]:
    """How many of the known samples are missing, and how many come too often."""
    values, counts = np.unique(whole, return_counts=True)
    found, times = np.unique(got, return_counts=True)
    have = dict(zip(found.tolist(), times.tolist(), strict=True))
    gap = np.array([have.get(v, 0) for v in values.tolist()]) - counts
    return int(-gap[gap < 0].sum()), int(gap[gap > 0].sum())


def _shared_start(reads: list[dict]) -> int:
    """Samples that several workers read, those left out that one worker alone reads twice."""
    own = [dict(zip(*(a.tolist() for a in np.unique(r["digests"], return_counts=True)), strict=True)) for r in reads]
    repeated = {v for seen in own for v, n in seen.items() if n > 1}
    met: dict[int, int] = {}
    for seen in own:
        for value in seen.keys() - repeated:
            met[value] = met.get(value, 0) + 1
    twice = sum(n - 1 for n in met.values())
    return twice if twice >= 0.5 * sum(len(s.keys() - repeated) for s in own[1:]) and twice else 0
