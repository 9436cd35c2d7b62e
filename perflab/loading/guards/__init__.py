"""Is a loader right? Asked before anybody makes it fast: eleven guards, each with what, how it was seen, the way out.

found = guards(loader)      # a table
found.require()             # no advice on speed behind an alarm

The room, in the order of the work; all reading is done in forked copies of the learner's process:
    evidence         what is examined and what was seen of it: Evidence, WorkerRun, Epoch; Check, what a rule says
    reference        stage 1: the dataset read in one process, without workers
    workers          stages 2 to 5: read by workers; what differs read again; the loader's own iteration
    probe            what stands in the dataset's place in a worker, and reads for it
    walk, digest     all that a dataset leads to; a sample in 64 bits
    pickled, resources   can it travel; what a process holds: memory, threads, descriptors, handles
    rules_samples, rules_random, rules_resources    from an Evidence to eleven Checks
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch.utils.data import DataLoader, IterableDataset

from perflab.bench.fork import fork
from perflab.bench.interrupt import Interruptible
from perflab.errors import PerflabError
from perflab.show.table import Alarm, Answer, table

from . import reference, rules_random, rules_resources, rules_samples, workers
from .evidence import ALARM, FINE, NOT_CHECKED, Check, Evidence
from .walk import put_back, shared

RULES = {
    "pickling": rules_samples.pickling,
    "device": rules_samples.device,
    "same samples": rules_samples.same_samples,
    "none lost or doubled": rules_samples.lost_or_doubled,
    "random streams": rules_random.random_streams,
    "set_epoch": rules_random.set_epoch,
    "file handles": rules_resources.file_handles,
    "memory growth": rules_resources.memory_growth,
    "threads": rules_resources.threads,
    "descriptors": rules_resources.descriptors,
    "last batch": rules_random.last_batch,
}
COLOURS = {FINE: "", ALARM: "#D55E00", NOT_CHECKED: "#7a7a7a"}
START_S = {"fork": 5.0, "forkserver": 30.0}  # beyond the patience: a fork server imports torch


@dataclass(frozen=True)
class Guards(Answer):
    """What every guard found, in their fixed order.

    >>> guards(loader)
    pickling: fine
    ...
    """

    checks: tuple[Check, ...]
    seconds: float

    def __getitem__(self, guard: str) -> Check:
        for check in self.checks:
            if check.guard == guard:
                return check
        raise KeyError(f"there is no guard {guard!r}; there are {', '.join(RULES)}")

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        return tuple(Alarm(c.what, c.seen, c.way_out, about=c.guard) for c in self.checks if c.state == ALARM)

    @property
    def clear(self) -> bool:
        """No alarm."""
        return not self.alarms

    def require(self) -> None:
        """Raise PerflabError that names every alarm, if there is one."""
        if self.alarms:
            raise PerflabError(f"This loader is not right yet. {self}")

    def __repr__(self):
        return "\n".join(map(repr, self.checks))

    def __str__(self):
        if self.alarms:
            return "\n".join(map(str, self.alarms))
        left = [c.guard for c in self.checks if c.state == NOT_CHECKED]
        return "No alarm" + (f"; not checked: {', '.join(left)}." if left else ".")

    def rows(self) -> list[dict]:
        columns = ("guard", "state", "what", "seen", "way_out")
        return [{name.replace("_", " "): getattr(check, name) for name in columns} for check in self.checks]

    def html(self) -> str:
        return table(self.rows(), colours={i: COLOURS[check.state] for i, check in enumerate(self.checks)})


def guards(loader_or_dataset, epochs: int = 2, timeout_s: float = 20.0, step=None) -> Guards:
    """Examine a DataLoader, or a dataset (then a DataLoader of 2 workers), without touching it.

    All reading is done in forked copies of this process, which are ended afterwards: the dataset, its
    generators and files, this process's random streams and the loader's own workers stay as they are.
    epochs: how many are compared. timeout_s: how long a silence is taken for a hang. step: what the
    loop does with a batch; where it is given, the guard of descriptors sees whether it keeps them.
    Raises PerflabError for what is neither loader nor dataset.

    >>> print(guards(loader))  # doctest: +SKIP
    """
    loader, bare = _as_loader(loader_or_dataset)
    if epochs < 1 or timeout_s <= 0:
        raise PerflabError(f"guards needs epochs of 1 or more and a timeout_s above 0, not {epochs} and {timeout_s}.")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise PerflabError('A worker imports this file: put what it runs under if __name__ == "__main__".')
    began = time.perf_counter()
    evidence = Evidence(loader, bare, step, epochs, timeout_s)
    with Interruptible() as door:
        for wanted, stage in STAGES:
            if wanted(evidence):
                _in_a_copy(stage, evidence, door)
    checks = tuple(replace(rule(evidence), guard=guard) for guard, rule in RULES.items())
    return Guards(checks, time.perf_counter() - began)


def _as_loader(given) -> tuple[DataLoader, bool]:
    if isinstance(given, DataLoader):
        return given, False
    if not (isinstance(given, IterableDataset) or hasattr(given, "__getitem__")):
        what = "guards takes a DataLoader, or a dataset with __getitem__ or an IterableDataset"
        raise PerflabError(f"{what}, not {type(given).__name__}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DataLoader(given, batch_size=8, num_workers=2), True


def _readable(evidence: Evidence) -> bool:
    return not evidence.ended and not evidence.devices and bool(evidence.keys or evidence.streams)


def _unexplained(evidence: Evidence) -> bool:
    """Samples differ, and neither a generator nor a shared offset says why."""
    explained = evidence.streams or evidence.own_random or evidence.ended or evidence.moved_offsets
    return not explained and any(run.other_content for run in evidence.runs)


def _own_iteration(evidence: Evidence) -> bool:
    own = evidence.step is not None or type(evidence.loader).__iter__ is not DataLoader.__iter__
    return own and bool(evidence.runs) and not evidence.ended


STAGES: list[tuple[Callable[[Evidence], bool], Callable]] = [
    (lambda evidence: True, reference.read_here),
    (lambda evidence: evidence.ended and evidence.start != "fork", workers.read_by_one_worker),
    (_readable, workers.read_by_workers),
    (_unexplained, workers.reread),
    (_own_iteration, workers.iterate),
]


def _in_a_copy(stage: Callable, evidence: Evidence, door: Interruptible):
    """Run a stage in a forked copy of this process, and learn what it says.

    Files that the copies read share their offsets with this process: they are put back.
    """
    before = workers.offsets()
    slack_s = 0.0 if stage is reference.read_here else START_S[evidence.start]
    outcome = door.call(fork, partial(_act, stage, evidence), evidence.patience_s + slack_s)
    for fd, at in workers.offsets().items():
        if fd in before and before[fd] != at:
            os.lseek(fd, before[fd], os.SEEK_SET)
    for fields in outcome.said:
        evidence.learn(**fields)
    evidence.ended, evidence.where = outcome.ended, outcome.where


def _act(stage: Callable, evidence: Evidence, say: Callable):
    """In the copy. Memory that it shares with this process (an epoch in a shared tensor, say) is put back, too."""

    def learn_and_say(**fields):
        evidence.learn(**fields)
        say(fields)

    held = shared(evidence.parts.roots)
    try:
        stage(evidence, learn_and_say)
    finally:
        put_back(held)


__all__ = ["Check", "Guards", "guards"]
