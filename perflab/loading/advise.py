"""How many workers does this loader want? Checked first, then measured, then said."""

import contextlib
import copy
import html
import itertools
import random
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from perflab.bench import machine
from perflab.bench.fork import value_of_fork
from perflab.bench.result import Result
from perflab.bench.study import observe, vary
from perflab.errors import PerflabError
from perflab.show.table import Alarm, Answer

from .guards import guards
from .inflight import fitting
from .rebuild import rebuilt

PATIENCE_S = 20.0


@dataclass(frozen=True, repr=False)
class Advice(Answer):
    """What the guards found, what the sweep measured (None behind an alarm), and what follows."""

    guards: Result
    result: Result | None

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        rows = self.guards.counts.items()
        return tuple(Alarm(row["alarm"], "", "", about=guard) for guard, row in rows if "alarm" in row)

    def rows(self) -> list[dict]:
        return self.result.summary() if self.result else []

    def html(self) -> str:
        return f"<p><b>{html.escape(str(self))}</b></p>"

    def __str__(self):
        if self.result is None:
            return f"No number of workers is recommended. {' '.join(map(str, self.alarms))}"
        knee = self.result.knee()
        if not knee.values:
            return f"No number of workers is recommended: {knee.why}."
        take = f"Take num_workers={knee.values[-1]}"
        if len(knee.values) > 1:
            return f"{take}: {' or '.join(knee.values)} reach 90 % of the best rate, and the rounds do not say which."
        more = " It is also the most that was tried: try more." if knee.values[0] == self.result.measured[-1] else ""
        return f"{take}: the fewest that reach 90 % of the best rate measured.{more}"

    def __repr__(self):
        return f"Advice on num_workers: {'no alarm' if self.result else 'alarm'}"

    def _ipython_display_(self):
        from IPython.display import display

        for result in filter(None, (self.guards, self.result)):
            display(result)
        display(self._repr_mimebundle_(), raw=True)


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
    checked = observe(f"{study}.guards", lambda: _states(loader), variable="guard")
    if Advice(checked, None).alarms:
        return Advice(checked, None)
    batches, count = _batches(loader, 2 * max(workers))

    def prepared(n: int) -> DataLoader:
        changes = {"num_workers": n, "persistent_workers": n > 0, "generator": None, **batches}
        if not n:
            changes["dataset"] = copy.copy(loader.dataset)  # workers must not inherit what it opens
        return fitting(rebuilt(loader, **changes))

    with _as_it_was():
        result = vary("num_workers", workers, _epoch, prepare=prepared, study=study, per="batch", work=count)
    return Advice(checked, result)


def _numbers(workers) -> list[int]:
    if workers is None:
        return [0, *(2**k for k in range(12) if 2**k <= 4 * machine.cores())]
    numbers = list(workers) if isinstance(workers, Iterable) else []
    if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise PerflabError(f"workers={workers!r} is no list of whole numbers of 0 or more: write [0, 1, 2, 4].")
    return numbers


def _states(loader: DataLoader) -> dict[str, dict[str, str]]:
    checked = guards(loader)
    rows = {check.guard: {"state": check.state} for check in checked.checks}
    for alarm in checked.alarms:
        rows[alarm.about]["alarm"] = f"{alarm.what} {alarm.way_out}"
    return rows


def _batches(loader: DataLoader, least: int) -> tuple[dict, int]:
    """The sampler that every row draws from, by its name, none for an iterable dataset; and how many batches it has."""
    try:
        samplers, batches = value_of_fork(lambda: _drawn(loader, least), PATIENCE_S)
    except PerflabError as reason:
        why = f"The batches of this loader cannot be counted ({reason})"
        raise PerflabError(f"{why}: give a shorter epoch.") from None
    if not batches:
        raise PerflabError("The loader gives no batch: is its dataset empty?")
    return samplers, batches


def _drawn(loader: DataLoader, least: int) -> tuple[dict, int]:
    began = time.perf_counter()
    alone = {"num_workers": 0, "pin_memory": False}
    if isinstance(loader.dataset, IterableDataset):
        return {}, sum(1 for _ in rebuilt(loader, **alone))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = iter(getattr(loader, name))
    batches = list(itertools.islice(indices, 1))
    _epoch(rebuilt(loader, **alone, **{name: batches}))
    most = max(least, round(1 / (time.perf_counter() - began)))
    batches += itertools.islice(indices, most - 1)
    return {name: batches}, len(batches)


@contextlib.contextmanager
def _as_it_was():
    """Torch is silent about many workers, and afterwards the random streams are those of before."""
    streams = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])


def _epoch(loader: DataLoader):
    for _ in loader:
        pass
