"""A dataset read by DataLoader workers, by several numbers of them and over several epochs.

It runs in a copy of the learner's process and says what it sees; nothing is judged here.
"""

import contextlib
import copy
import fcntl
import itertools
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from perflab.errors import first_line

from .digest import SOURCES, tensors
from .evidence import EpochChange, Evidence, WorkerRun
from .probe import Init, Probe, ProbeStream, Read, read
from .reference import BLOCK, keys_of
from .resources import descriptors

DRAWS = 24
RACE_S = 0.5
LONGEST_REFERENCE = 2**18  # samples that one worker reads
PRELOADED = ["torch", "perflab.loading.guards.probe"]


def unchanged(x):
    return x


class Crew:
    """DataLoader workers that do what a script says: the n-th command goes to worker n modulo their number."""

    def __init__(self, evidence: Evidence, workers: int, probe=None, persistent: bool = False):
        if evidence.start == "forkserver" and forkserver._forkserver._forkserver_pid is None:
            _serve_forks()
        self.evidence, self.workers = evidence, workers
        self.script: Iterable = ()
        self.running, self.first_reply_at = None, None
        self.loader = DataLoader(
            probe or Probe(evidence.parts),
            batch_size=None,
            sampler=None if evidence.streams else self,
            num_workers=workers,
            collate_fn=unchanged,
            worker_init_fn=Init(evidence.parts),
            multiprocessing_context=evidence.start,
            timeout=evidence.patience_s,
            persistent_workers=persistent,
            generator=evidence.loader.generator,
        )

    def __iter__(self):
        return iter(self.script)

    def replies(self, script: Iterable = ()) -> Iterator[tuple[str, object]]:
        """The replies to one epoch's commands, in their order."""
        self.script, self.first_reply_at = script, None
        self.running = iter(self.loader)
        for reply in self.running:
            self.first_reply_at = self.first_reply_at or time.perf_counter()
            yield reply

    def run(self, say: Callable, script: Iterable = (), content: bool = False) -> WorkerRun:
        """One epoch's commands, and what came of them by place and by worker."""
        run, reference = WorkerRun(self.workers, content), self.evidence.read
        other_content, other_form = set(), set()
        told_at = time.monotonic()
        for name, reply in self.replies(script):
            if name in ("read", "read_yielding"):
                run.compared += reply.done
                other_content.update(differing(reference, reply))
                other_form.update(k for k, form in reply.forms.items() if reference.forms.get(k, form) != form)
            elif name == "draw":
                run.draws[reply.worker] = reply
            elif name == "stream":
                run.streams[reply.worker] = reply
            elif name == "census":
                run.census.setdefault(reply.worker, []).append(reply)
            elif name == "again":
                run.rereads += reply[0]
                run.threads_running = max(run.threads_running, reply[1])
            if time.monotonic() - told_at > 0.2:
                told_at = time.monotonic()
                say()
        run.other_content, run.other_form = sorted(other_content), sorted(other_form)
        return run

    def seconds(self) -> float:
        """Since the first reply: workers may take seconds to start."""
        return time.perf_counter() - self.first_reply_at if self.first_reply_at else 0.0

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        end(self.running, at_once=kind is not None)
        self.loader._iterator = None


def _serve_forks():
    """Before workers start by forkserver: one server that imports torch once for all.

    The tracker of semaphores is started outside the group that is killed in the end: it then removes
    what the killed leave in /dev/shm.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    os.setpgid(0, os.getpgid(os.getppid()))
    try:
        resource_tracker.ensure_running()
    finally:
        os.setpgid(0, 0)
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()  # waits for the server, so that no timeout of a worker counts its imports
    first.join()


def end(running, at_once: bool):
    """End the workers of an iterator; those that hang are not waited for."""
    if not hasattr(running, "_workers"):
        return
    if at_once:
        signal_handling._remove_worker_pids(id(running))
        running._worker_pids_set = False
        for worker in running._workers:
            worker.kill()
    running._shutdown_workers()


def differing(reference: Read, reading: Read) -> Iterator[int]:
    """Places whose sample in a worker is another one than alone, or can be read only here or only there."""
    expected = reference.digests[reading.first : reading.first + reading.done]
    for place in np.flatnonzero(expected != reading.digests) + reading.first:
        if not (place in reading.errors and place in reference.errors):
            yield int(place)


def read_by_workers(evidence: Evidence, say: Callable):
    """The loader's own number of workers over some epochs, then other numbers, then a reading that gives way."""
    sizes = [n for n in (2, 4) if n != evidence.trial_workers]
    (_read_stream if evidence.streams else _read_items)(evidence, sizes, say)
    if evidence.loader.persistent_workers and evidence.parts.epoch_owners():
        say(epoch_in_workers=_epoch_change(evidence))


def _read_items(evidence: Evidence, sizes: list[int], say: Callable):
    before = offsets()
    with Crew(evidence, evidence.trial_workers, persistent=evidence.loader.persistent_workers) as crew:
        say(run=crew.run(say, _first_epoch(evidence, crew)))
        say(moved_offsets=_moved(before))
        for size in sizes:
            with Crew(evidence, size) as another:
                script = _reads(another, "read")
                if size == max(sizes):
                    script = itertools.chain(script, _reads(another, "read_yielding"))
                say(run=another.run(say, script))
        evidence.parts.set_epoch()  # as the learner's loop would
        for _ in range(1, evidence.epochs):
            say(run=crew.run(say, _draws(evidence)))


def _first_epoch(evidence: Evidence, crew: Crew):
    n = crew.workers
    few = evidence.good_keys[: min(8, evidence.few)]
    times = max(1, min(8, round(0.06 / max(1e-6, evidence.item_s) / max(1, len(few)))))
    yield from _draws(evidence)
    yield from [("census",)] * n
    yield from _reads(crew, "read")
    yield from [("census",)] * n
    for _ in range(2):
        yield from [("again", few, times)] * n
        yield from [("census",)] * n


def _draws(evidence: Evidence):
    seconds = min(0.12 * max(1.0, evidence.partial_s), 0.1 * evidence.patience_s)
    most = max(4, min(DRAWS, int(2 * seconds / max(1e-6, evidence.item_s))))
    keys = evidence.good_keys[: 2 if evidence.item_s < seconds else 1]
    return [("draw", keys, most, seconds)] * evidence.trial_workers


def _reads(crew: Crew, command: str):
    """All that was read alone, in runs small enough that all workers read at once, until the time is spent."""
    evidence = crew.evidence
    n, item_s, limit_s, began = len(evidence.keys), evidence.item_s, 2 * evidence.read.seconds + 0.5, None
    if command == "read_yielding":
        item_s, limit_s = 10 * item_s, RACE_S * max(1.0, evidence.partial_s)
    length = int(max(1, min(0.05 / max(1e-7, item_s), n / (2 * crew.workers), 2000)))
    for first in range(0, n, length):
        if began is None and crew.first_reply_at:
            began = crew.seconds()
        if began is not None and crew.seconds() - began > limit_s:
            return
        yield command, first, evidence.keys[first : first + length], evidence.sources


def _read_stream(evidence: Evidence, sizes: list[int], say: Callable):
    """Who reads what with the global streams alike, and where random streams stand without that."""
    if evidence.stream.ended:
        seconds, most = 2 * evidence.stream.seconds + 0.5, max(16, 2 * len(evidence.stream.digests))
    else:  # a beginning shows whether two workers read the same, no more
        seconds, most = 0.5 * evidence.partial_s, max(16, len(evidence.stream.digests))
    before = offsets()
    for size in [evidence.trial_workers, *sizes]:
        with Crew(evidence, size, ProbeStream(evidence.parts, True, most, seconds)) as crew:
            say(run=crew.run(say, content=True))
        if size == evidence.trial_workers:
            say(moved_offsets=_moved(before))
    probe = ProbeStream(evidence.parts, False, 16, 0.3)
    with Crew(evidence, evidence.trial_workers, probe, evidence.loader.persistent_workers) as crew:
        for epoch in range(evidence.epochs):
            if epoch:
                evidence.parts.set_epoch()
            say(run=crew.run(say))
    say(own_random=evidence.own_random or _own_generator_decides(evidence))


def _own_generator_decides(evidence: Evidence) -> bool:
    """Do workers give samples that are new here, while a generator of the stream's own moves on between samples?"""
    return any(
        set(read.moved) - set(SOURCES) and not np.isin(read.digests[1:], evidence.stream.digests).all()
        for run in evidence.content_runs
        for read in run.streams.values()
    )


def _epoch_change(evidence: Evidence) -> EpochChange:
    """Do workers that persist see a set_epoch of the main process? By samples, and by its owners' attributes."""
    if evidence.streams:
        probe, script = ProbeStream(evidence.parts, True, 64, 0.3), ()
    else:
        probe, script = None, [("read", 0, evidence.keys[: evidence.few], SOURCES), ("epochs",)]
    with Crew(evidence, 1, probe, persistent=True) as crew:
        before = dict(crew.replies(script))
        evidence.parts.set_epoch()
        after = dict(crew.replies(script))
    name = "stream" if evidence.streams else "read"
    return EpochChange(
        paths=[],
        samples=not np.array_equal(before[name].digests, after[name].digests),
        attributes=after["epochs"] == evidence.parts.epoch_attributes(),
    )


def read_by_one_worker(evidence: Evidence, say: Callable):
    """The reading that all is compared with, by one worker: where a forked copy cannot read, but a new process can."""
    say(by_worker=True)
    if evidence.streams:
        with Crew(evidence, 1, ProbeStream(evidence.parts, True, 10_000_000, evidence.whole_s)) as crew:
            say(stream=crew.run(say).streams[0], batch_tensors=0)
        return
    keys, total, epoch = keys_of(evidence.loader)
    runs = [keys[at : at + BLOCK] for at in range(0, min(len(keys), LONGEST_REFERENCE), BLOCK)]
    reads: list[Read] = []

    def script(crew: Crew):
        for number, run in enumerate(runs):
            if crew.seconds() > evidence.whole_s:
                break
            yield "read", number * BLOCK, run, SOURCES
        yield "read", 0, runs[0], SOURCES

    with Crew(evidence, 1) as crew:
        for _, reading in crew.replies(script(crew)):
            reads.append(reading)
            say()
    *reads, again = reads
    whole = Read.joined(reads)
    say(total=total, epoch=epoch, devices=set(), keys=list(keys[: whole.done]), read=whole, batch_tensors=0)
    say(own_random=not np.array_equal(again.digests, reads[0].digests))


def reread(evidence: Evidence, say: Callable):
    """Places that differed, and others, read twice here and twice by one worker, with every stream started alike."""
    n, parts, keys = len(evidence.keys), evidence.parts, evidence.keys
    differing_places = sorted(set().union(*(run.other_content for run in evidence.runs)))
    until = time.perf_counter() + max(0.5, evidence.partial_s)
    here: dict[int, list[int]] = {}
    for place in [*differing_places[:200], *range(0, n, max(1, n // 2000))]:
        here[place] = [int(read(parts, place, [keys[place]]).digests[0]) for _ in range(2)]
        say()
        if time.perf_counter() > until:
            break
    script = [("read", place, [keys[place]], SOURCES) for place in here for _ in range(2)]
    with Crew(evidence, 1) as crew:
        there = [int(reading.digests[0]) for _, reading in crew.replies(script)]
    pairs = zip(there[::2], there[1::2], strict=True)
    say(rereadings={place: (*mine, *pair) for (place, mine), pair in zip(here.items(), pairs, strict=True)})


def iterate(evidence: Evidence, say: Callable):
    """The loader itself, for some batches: how many descriptors stay open once a batch has been let go."""
    loader = copy.copy(evidence.loader)
    loader._iterator, loader.pin_memory = None, False
    fds, sizes, running, error = [], [], None, ""
    began = time.perf_counter()
    try:
        running = iter(loader)
        for batch in running:
            sizes.append(sum(1 for _ in tensors(batch)))
            if evidence.step is not None:
                evidence.step(batch)
            del batch
            fds.append(len(descriptors()))
            say()
            if len(fds) >= 64 or (len(fds) >= 12 and time.perf_counter() - began > 1.0):
                break
    except Exception as fault:
        error = first_line(fault)
    finally:
        for iterator in (running, getattr(loader, "_iterator", None)):
            end(iterator, at_once=True)
    say(fds_by_batch=fds, tensors_by_batch=sizes, step_error=error)


def offsets() -> dict[int, int]:
    """Where each regular file that this process may read stands, by descriptor."""
    stands = {}
    for fd in descriptors():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                stands[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return stands


def _moved(before: dict[int, int]) -> dict[int, str]:
    """Descriptors whose offset is another one than `before`, with the name of their file."""
    now, names = offsets(), descriptors()
    return {fd: names[fd] or f"descriptor {fd}" for fd, at in before.items() if now.get(fd, at) != at}
