"""A dataset read by crews of DataLoader workers, of several sizes and over several epochs.

It runs in a double of the learner's process and says what it sees; nothing is judged here.
"""

import copy
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from .case import Alone, Case
from .census import count_fds
from .digest import SOURCES, tensors
from .double import serve_forks, told
from .probe import Init, Probe, ProbeStream, Read, attributes, read, with_epoch
from .reference import BLOCK, few_items, joined, keys_of, set_epoch

DRAWS = 24
STRESS_S = 0.5


def as_it_is(x):
    return x


class Crew:
    """DataLoader workers that do what a script says: the n-th command goes to worker n modulo their number."""

    def __init__(self, case: Case, workers: int, probe=None, persistent: bool = False):
        if case.start == "forkserver" and forkserver._forkserver._forkserver_pid is None:
            serve_forks()
        stands_in = probe or Probe(case.parts)
        self.script: Iterable = ()
        self.loader = DataLoader(
            stands_in,
            batch_size=None,
            sampler=None if case.streams else self,
            num_workers=workers,
            collate_fn=as_it_is,
            worker_init_fn=Init(case.parts),
            multiprocessing_context=case.start,
            timeout=case.timeout_s,
            persistent_workers=persistent,
            generator=case.loader.generator,
        )
        self.running, self.heard, self.workers = None, False, workers

    def __iter__(self):
        return iter(self.script)

    def go(self, script: Iterable = ()) -> Iterator[tuple[str, object]]:
        """The replies to one epoch's commands, in their order."""
        self.script, self.heard = script, False
        self.running = iter(self.loader)
        for reply in self.running:
            self.heard = True
            yield reply

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        end(self.running, at_once=kind is not None)
        self.loader._iterator = None


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


def crews(case: Case, alone: Alone, sizes: list[int], say: Callable):
    """The loader's own number of workers over some epochs, then other numbers, then a reading that gives way."""
    persistent, before = case.loader.persistent_workers, offsets()
    with Crew(case, case.workers, persistent=persistent) as crew:
        heard = _hear(crew.go(_first_epoch(case, alone, crew)), say)
        say({"crew": case.workers, **_ordered(heard, alone)})
        say({"moved_offsets": _moved(before)})
        for size in sizes:
            with Crew(case, size) as another:
                script = _reads(case, alone, another, "read")
                if size == max(sizes):
                    script = itertools.chain(script, _reads(case, alone, another, "read_yielding"))
                say({"crew": size, **_ordered(_hear(another.go(script), say), alone)})
        set_epoch(case.parts)  # as the learner's loop would
        for _ in range(1, case.epochs):
            say({"crew": case.workers, **_ordered(_hear(crew.go(_draws(case, alone)), say), alone)})
    if persistent and with_epoch(case.parts):
        say({"epoch_workers": _epoch_workers(case, alone)})


def _first_epoch(case: Case, alone: Alone, crew: Crew):
    n = crew.workers
    good = [key for k, key in enumerate(alone.keys) if k not in alone.seen.errors]
    yield from _draws(case, alone)
    yield from [("census",)] * n
    yield from _reads(case, alone, crew, "read")
    yield from [("census",)] * n
    few = good[: min(8, few_items(case, alone.seen))]
    times = max(1, min(8, round(0.06 / max(1e-6, alone.item_s) / max(1, len(few)))))
    for _ in range(2):
        yield from [("again", few, times)] * n
        yield from [("census",)] * n


def _draws(case: Case, alone: Alone):
    good = [key for k, key in enumerate(alone.keys) if k not in alone.seen.errors]
    seconds = min(0.12 * max(1.0, case.partial_s), 0.1 * case.timeout_s)
    most = max(4, min(DRAWS, int(2 * seconds / max(1e-6, alone.item_s))))
    return [("draw", good[: 2 if alone.item_s < seconds else 1], most, seconds)] * case.workers


def _reads(case: Case, alone: Alone, crew: Crew, command: str):
    """All that was read alone, in runs small enough that all workers read at once, until the time is spent.

    The time counts from the first reply: workers may take seconds to start.
    """
    n, began = len(alone.keys), None
    item_s, limit = alone.item_s, 2 * alone.seen.seconds + 0.5
    if command == "read_yielding":
        item_s, limit = 10 * item_s, STRESS_S * max(1.0, case.partial_s)
    run = int(max(1, min(0.05 / max(1e-7, item_s), n / (2 * crew.workers), 2000)))
    for at in range(0, n, run):
        if crew.heard and time.perf_counter() - (began := began or time.perf_counter()) > limit:
            return
        yield command, at, alone.keys[at : at + run], alone.sources


def _hear(replies: Iterator, say) -> dict[str, list]:
    heard: dict[str, list] = {}
    told_at = time.monotonic()
    for name, content in replies:
        heard.setdefault(name, []).append(content)
        if time.monotonic() - told_at > 0.2:
            told_at = time.monotonic()
            say({"at": 0})
    return heard


def _ordered(heard: dict[str, list], alone: Alone) -> dict:
    """What a crew said, by place and by worker; `wrong` are places whose sample is not the one read alone."""
    reads = [*heard.get("read", []), *heard.get("read_yielding", [])]
    counts: dict[int, list[dict]] = {}
    for seen in heard.get("census", []):
        counts.setdefault(seen["id"], []).append(seen)
    return {
        "compared": sum(seen.done for _, seen in reads),
        "wrong": sorted({k for first, seen in reads for k in differs(alone.seen, first, seen)}),
        "strange": sorted({k for _, seen in reads for k, f in seen.forms.items() if alone.seen.forms.get(k, f) != f}),
        "draws": {seen["id"]: seen for seen in heard.get("draw", [])},
        "census": counts,
        "again": sum(reads for reads, _ in heard.get("again", [])),
        "at_once": max((threads for _, threads in heard.get("again", [])), default=1),
        "streams": {seen["id"]: seen for seen in heard.get("stream", [])},
    }


def differs(reference: Read, first: int, seen: Read) -> Iterator[int]:
    """Places whose sample in a worker is another one than alone, or can be read only here or only there."""
    for k in np.flatnonzero(reference.digests[first : first + seen.done] != seen.digests[: seen.done]) + first:
        if not (k in seen.errors and k in reference.errors):
            yield int(k)


def offsets() -> dict[int, int]:
    """Where each regular file that this process may read stands, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        try:
            fd = int(name)
            if stat.S_ISREG(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                found[fd] = os.lseek(fd, 0, os.SEEK_CUR)
        except OSError:
            continue
    return found


def _moved(before: dict[int, int]) -> dict[int, str]:
    """Descriptors whose offset is another one than `before`, with the name of their file."""
    now = offsets()
    return {fd: _name(fd) for fd, at in before.items() if now.get(fd, at) != at}


def _name(fd: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).removesuffix(" (deleted)")
    except OSError:
        return f"descriptor {fd}"


def _epoch_workers(case: Case, alone: Alone) -> dict:
    """Do workers that persist see a set_epoch of the main process? By samples, and by its owners' attributes."""
    keys = alone.keys[: few_items(case, alone.seen)]
    script = [("read", 0, keys, SOURCES), ("epochs",)]
    with Crew(case, 1, persistent=True) as crew:
        before = dict(crew.go(script))
        set_epoch(case.parts)
        here = [attributes(x) for _, x in with_epoch(case.parts)]
        after = dict(crew.go(script))
    changed = bool((before["read"][1].digests != after["read"][1].digests).any())
    return {"samples": changed, "attributes": after["epochs"] == here}


def by_one_worker(case: Case, say: Callable):
    """The reading that all is compared with, by one worker: where a forked copy cannot read, but a new process can."""
    if case.streams:
        with Crew(case, 1, ProbeStream(case.parts, True, 10_000_000, case.whole_s)) as crew:
            heard = _hear(crew.go(), say)
        say({"stream stream": heard["stream"][0], "batch_tensors": 0})
        return
    keys, total, epoch = keys_of(case.loader)
    runs = [keys[at : at + BLOCK] for at in range(0, min(len(keys), 2**18), BLOCK)]
    began, reads = None, []

    def script():
        nonlocal began
        for k, run in enumerate(runs):
            if crew.heard and time.perf_counter() - (began := began or time.perf_counter()) > case.whole_s:
                break
            yield "read", k * BLOCK, run, SOURCES
        yield "read", 0, runs[0], SOURCES

    with Crew(case, 1) as crew:
        for _, (_, seen) in crew.go(script()):
            reads.append(seen)
            say({"at": len(reads)})
    *reads, again = reads
    done = sum(seen.done for seen in reads)
    n = min(again.done, reads[0].done)
    say({"total": total, "epoch": epoch, "devices": [], "keys": list(keys[:done]), "seen": joined(reads)})
    say({"own_random": bool((again.digests[:n] != reads[0].digests[:n]).any()), "batch_tensors": 0, "by_worker": True})


def stream_crews(case: Case, alone: Alone, sizes: list[int], say: Callable):
    """As `crews`, for an iterable dataset: who reads what, and where random streams stand."""
    if alone.stream["ended"]:
        seconds, most = 2 * alone.stream["seconds"] + 0.5, max(16, 2 * len(alone.stream["digests"]))
    else:  # a beginning shows whether two workers read the same, no more
        seconds, most = 0.5 * case.partial_s, max(16, len(alone.stream["digests"]))
    before = offsets()
    for size in [case.workers, *sizes]:
        with Crew(case, size, ProbeStream(case.parts, True, most, seconds)) as crew:
            say({"crew": size, "content": True, **_ordered(_hear(crew.go(), say), alone)})
        if size == case.workers:
            say({"moved_offsets": _moved(before)})
    persistent = case.loader.persistent_workers
    with Crew(case, case.workers, ProbeStream(case.parts, False, 16, 0.3), persistent) as crew:
        for epoch in range(case.epochs):
            if epoch:
                set_epoch(case.parts)
            say({"crew": case.workers, **_ordered(_hear(crew.go(), say), alone)})
    if persistent and with_epoch(case.parts):
        with Crew(case, 1, ProbeStream(case.parts, True, 64, 0.3), persistent=True) as crew:
            first = _hear(crew.go(), say)["stream"][0]["digests"]
            set_epoch(case.parts)
            second = _hear(crew.go(), say)["stream"][0]["digests"]
        say({"epoch_workers": {"samples": not np.array_equal(first, second), "attributes": False}})


def verify(case: Case, alone: Alone, wrong: list[int], say: Callable):
    """Places that differed, and others, read twice here and twice by one worker, with every stream started alike."""
    places = [*wrong[:200], *range(0, len(alone.keys), max(1, len(alone.keys) // 2000))]
    until = time.perf_counter() + max(0.5, case.partial_s)
    here: list[list[int]] = []
    for k in places:
        here.append([int(read(case.parts, k, [alone.keys[k]]).digests[0]) for _ in range(2)])
        if time.perf_counter() > until:
            break
        say({"at": k})
    places = places[: len(here)]
    script = [("read", k, [alone.keys[k]], SOURCES) for k in places for _ in range(2)]
    with Crew(case, 1) as crew:
        heard = [int(seen.digests[0]) for _, (_, seen) in crew.go(script)]
    say({"verified": {k: (*here[i], *heard[2 * i : 2 * i + 2]) for i, k in enumerate(places)}})


def as_it_stands(case: Case, step, say: Callable):
    """The loader itself, for some batches: how many descriptors stay open once a batch has been let go."""
    loader = copy.copy(case.loader)
    loader._iterator, loader.pin_memory = None, False
    held, sizes = [], []
    running = None
    began = time.perf_counter()
    try:
        running = iter(loader)
        for batch in running:
            sizes.append(sum(1 for _ in tensors(batch)))
            if step is not None:
                step(batch)
            del batch
            held.append(count_fds())
            say({"at": len(held)})
            if len(held) >= 64 or (len(held) >= 12 and time.perf_counter() - began > 1.0):
                break
        say({"held": held, "tensors": sizes, "step_error": ""})
    except Exception as fault:
        say({"held": held, "tensors": sizes, "step_error": told(fault)})
    finally:
        for iterator in (running, getattr(loader, "_iterator", None)):
            end(iterator, at_once=True)


__all__ = ["Crew", "as_it_stands", "by_one_worker", "crews", "offsets", "stream_crews", "verify"]
