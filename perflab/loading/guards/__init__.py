"""Is a loader right? Asked before anybody makes it fast: eleven guards, each with what, how it was seen, the way out.

found = guards(loader)      # a table
found.require()             # no advice on speed behind an alarm
"""

import html
import multiprocessing
import os
import resource
import time
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
from torch.utils.data import DataLoader, IterableDataset

from perflab.bench.interrupt import Interruptible
from perflab.bench.settings import budget
from perflab.errors import PerflabError
from perflab.show.table import Alarm

from . import rules_random, rules_resources, rules_samples
from .case import Alone, Case
from .census import count_fds
from .double import double
from .pickled import start_method
from .probe import Parts
from .reference import alone
from .rules_samples import ALARM, Check, Evidence
from .walk import put_back, shared
from .workers import as_it_stands, by_one_worker, crews, offsets, stream_crews, verify

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
START_S = 30.0  # that a fork server may take to import torch
MOST_WORKERS = 8  # of a crew that reads on trial


@dataclass(frozen=True)
class Guards:
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
        left = [c.guard for c in self.checks if c.state == rules_samples.NOT_CHECKED]
        return "No alarm" + (f"; not checked: {', '.join(left)}." if left else ".")

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": repr(self), "text/html": self._html()}

    def _html(self) -> str:
        colours = {rules_samples.FINE: "#009E73", ALARM: "#D55E00", rules_samples.NOT_CHECKED: "#7a7a7a"}
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in ("guard", "", "what", "seen", "way out"))
        rows = ""
        for c in self.checks:
            state = f"<b style='color:{colours[c.state]}'>{c.state}</b>"
            cells = [c.guard, state, *map(html.escape, (c.what, c.seen, c.way_out))]
            rows += "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


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
    with Interruptible() as door:
        seen = _look(loader, bare, epochs, timeout_s, step, door)
    checks = tuple(Check(guard, *rule(seen)) for guard, rule in RULES.items())
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


def _look(loader: DataLoader, bare: bool, epochs: int, timeout_s: float, step, door: Interruptible) -> Evidence:
    method = start_method(loader)
    full = budget() == "full"
    workers = min(loader.num_workers or 2, MOST_WORKERS)
    batches = loader.batch_size is not None or loader.batch_sampler is not None
    parts = Parts(loader.dataset, loader.collate_fn, loader.worker_init_fn, batches)
    start = "fork" if method == "fork" else "forkserver"
    times = (6.0, 20.0) if full else (0.6, 2.0)
    case = Case(loader, parts, max(2, workers), method, start, epochs, timeout_s, *times)
    seen = Evidence(case, Alone(), bare, threads=psutil.Process().num_threads(), fds=count_fds())
    seen.fd_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    seen.kept = _kept_tensors()

    def listen(act):
        before = offsets()
        slack = 0 if act.func is alone else 5 if case.start == "fork" else START_S
        heard = door.call(double, partial(_leaving_shared_memory, act, parts), case.timeout_s + slack)
        _put_back(before)
        for said in heard.said:
            seen.crews.append(said) if "crew" in said else seen.facts.update(said)
        if heard.ended:
            seen.ended, seen.where = heard.ended, heard.where
        return heard

    listen(partial(alone, case))
    if case.start != "fork" and seen.facts.get("pickling"):
        case.start = "fork"
    if seen.ended and case.start != "fork":
        seen.ended = seen.where = ""
        listen(partial(by_one_worker, case))
    _settle(seen)
    if seen.ended or seen.facts.get("devices") or not (seen.alone.keys or case.streams):
        return seen
    if seen.alone.seen is not None:  # one command to a worker is some readings
        case.timeout_s = max(timeout_s, 20 * seen.alone.item_s)
    sizes = [n for n in (2, 4) if n != case.workers]
    listen(partial(stream_crews if case.streams else crews, case, seen.alone, sizes))
    if case.streams:
        facts = seen.facts
        facts["own_random"] = facts.get("own_random", False) or rules_samples.own_generator_decides(seen)
    wrong = set().union(*(crew["wrong"] for crew in seen.crews)) if not case.streams else ()
    if wrong and not (seen.alone.own_random or seen.ended or seen.facts["moved_offsets"]):
        heard = listen(partial(verify, case, seen.alone, sorted(wrong)))
        seen.verified = seen.facts.get("verified", {}) if not heard.ended else {}
    if (step is not None or type(loader).__iter__ is not DataLoader.__iter__) and not seen.ended:
        listen(partial(as_it_stands, case, step))
    return seen


def _settle(seen: Evidence):
    """What reading alone said, in the form that later readings compare with."""
    facts, alone = seen.facts, seen.alone
    alone.keys, alone.total = facts.get("keys", []), facts.get("total", 0)
    alone.seen, alone.sources = facts.get("seen"), facts.get("sources", alone.sources)
    alone.facts = facts
    if seen.case.streams:
        alone.stream = facts.get("stream stream", {})
        again = facts.get("stream again")
        if again is not None and alone.stream:
            first = alone.stream["digests"]
            if not alone.stream["ended"]:
                first = first[: len(again["digests"])]
            facts["own_random"] = not np.isin(again["digests"], first).all()


def _leaving_shared_memory(act, parts: Parts, say):
    """What a copy of this process shares with it (an epoch in a shared tensor, say) holds afterwards what it held."""
    held = shared(parts.roots)
    try:
        act(say)
    finally:
        put_back(held)


def _put_back(before: dict[int, int]):
    """Files that the copies of this process read share their offsets with it."""
    for fd, at in offsets().items():
        if fd in before and before[fd] != at:
            os.lseek(fd, before[fd], os.SEEK_SET)


def _kept_tensors() -> int:
    """Descriptors of this process that hold memory which a worker's tensor came in."""
    kept = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            kept += os.path.basename(os.readlink(f"/proc/self/fd/{name}")).startswith("torch_")
        except OSError:
            continue
    return kept


__all__ = ["Check", "Guards", "guards"]
