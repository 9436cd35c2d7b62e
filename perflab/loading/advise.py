"""How many workers does this loader want? Checked first, then measured, then said."""

import contextlib
import copy
import html
import itertools
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader

from perflab.bench import machine
from perflab.bench.estimate import Knee
from perflab.bench.result import Result
from perflab.bench.study import observe, vary
from perflab.errors import PerflabError

from .guards import guards
from .inflight import fitting
from .rebuild import batches_drawn, rebuilt

warnings.filterwarnings("ignore", message="This DataLoader will create")

ENDLESS_S = 20


@dataclass(frozen=True)
class Advice:
    """What the guards found, what the sweep measured (None behind an alarm), and what follows."""

    guards: Result
    result: Result | None

    @property
    def alarms(self) -> dict[str, str]:
        """What is wrong and the way out, by guard."""
        return {guard: seen["alarm"] for guard, seen in self.guards.counts.items() if "alarm" in seen}

    @property
    def knee(self) -> Knee:
        return self.result.knee() if self.result else Knee((), "a guard raised an alarm")

    def __str__(self):
        if self.result is None:
            wrong = " ".join(f"{guard}: {alarm}" for guard, alarm in self.alarms.items())
            return f"No number of workers is recommended. {wrong}"
        few, most = self.knee.values, self.result.measured[-1] if self.result.measured else ""
        if not few:
            return f"No number of workers is recommended: {self.knee.why}."
        if len(few) == 1:
            more = " It is also the most that was tried: try more." if few[0] == most else ""
            return f"Take num_workers={few[0]}: the fewest that reach 90 % of the best rate measured.{more}"
        rest = f"{' or '.join(few)} reach 90 % of the best rate, and the rounds do not say which."
        return f"Take num_workers={few[-1]}: {rest}"

    def __repr__(self):
        return f"Advice on num_workers: {'no alarm' if self.result else 'alarm'}"

    def _ipython_display_(self):
        from IPython.display import display

        display(self.guards)
        if self.result is not None:
            display(self.result)
        display({"text/plain": repr(self), "text/html": f"<p><b>{html.escape(str(self))}</b></p>"}, raw=True)


def _states(loader: DataLoader) -> dict[str, dict[str, str]]:
    found = guards(loader)
    alarms = {a.about: {"alarm": f"{a.what} {a.way_out}"} for a in found.alarms}
    return {c.guard: {"state": c.state} | alarms.get(c.guard, {}) for c in found.checks}


def advise(loader: DataLoader, workers: Sequence[int] | None = None, *, study: str = "own.workers") -> Advice:
    """Sweep `num_workers` of loaders like this one; nothing is measured, and nothing advised, behind an alarm.

    workers: by default 0, 1, 2, 4, ... up to four times the usable cores. One call loads batches for about
    a second of one process, at least two for each worker, without any training step; of an iterable dataset
    a whole epoch. Random streams, sampler and generator stay as they were, and what the dataset opens when it
    is first read is opened in a copy. What would not fit into shared memory is a row with its reason. Raises
    PerflabError for what is no loader, for numbers of workers that are none, for an endless epoch.

    >>> print(advise(loader))  # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise PerflabError(
            f"advise takes a DataLoader, not {type(loader).__name__}: DataLoader(dataset, batch_size=8)."
        )
    workers = _numbers(workers)
    found = observe(f"{study}.guards", lambda: _states(loader), variable="guard")
    if Advice(found, None).alarms:
        return Advice(found, None)
    with _as_it_was(loader):
        sampler, count = _batches(loader, 2 * max(workers))

        def prepared(n: int) -> DataLoader:
            few = {} if sampler is None else {"batch_sampler": sampler}
            data = {} if n else {"dataset": copy.copy(loader.dataset)}  # workers must not inherit what it opens
            return fitting(rebuilt(loader, num_workers=n, persistent_workers=n > 0, **few, **data))

        result = vary("num_workers", workers, _epoch, prepare=prepared, study=study, per="batch", work=count)
    return Advice(found, result)


def _numbers(workers) -> list[int]:
    if workers is None:
        return [0, *itertools.takewhile(lambda n: n <= 4 * machine.cores(), (2**k for k in range(12)))]
    numbers = list(workers) if hasattr(workers, "__iter__") and not isinstance(workers, str) else []
    if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise PerflabError(f"workers={workers!r} is no list of whole numbers of 0 or more: write [0, 1, 2, 4].")
    return numbers


@contextlib.contextmanager
def _as_it_was(loader: DataLoader):
    """Afterwards the random streams and the attributes of the samplers are those of before."""
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawers = [loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    before = [(s, dict(vars(s))) for s in drawers if hasattr(s, "__dict__")]
    generators = [g for g in {loader.generator, *(getattr(s, "generator", None) for s in drawers)} if g is not None]
    states = [(g, g.get_state()) for g in generators]
    try:
        yield
    finally:
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])
        for drawer, attributes in before:
            vars(drawer).update(attributes)
        for generator, state in states:
            generator.set_state(state)


def _batches(loader: DataLoader, least: int) -> tuple[list | None, int]:
    """The lists of indices that every row loads, or None for an iterable dataset; and how many batches these are."""
    once = rebuilt(loader, num_workers=0, dataset=copy.copy(loader.dataset))
    sampler, count = batches_drawn(loader), 0
    began = time.perf_counter()
    if sampler is None:
        for _ in once:
            count += 1
            if time.perf_counter() - began > ENDLESS_S:
                raise PerflabError(f"An epoch of this loader did not end within {ENDLESS_S} s: give a shorter one.")
    else:
        drawn = iter(sampler)
        if first := next(drawn, None):
            next(iter(rebuilt(once, batch_sampler=[first])))
            most = max(least, round(1 / (time.perf_counter() - began)))
            sampler = [first, *itertools.islice(drawn, most - 1)]
            count = len(sampler)
    if not count:
        raise PerflabError("The loader gives no batch: is its dataset empty, or drop_last on?")
    return sampler, count


def _epoch(loader: DataLoader):
    for _ in loader:
        pass
