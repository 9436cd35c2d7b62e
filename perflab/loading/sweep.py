"""How many workers does this loader want? Checked first, then measured, then said."""

import html
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.data import DataLoader

from perflab.bench import machine
from perflab.bench.estimate import Knee
from perflab.bench.result import Result
from perflab.bench.study import observe, vary
from perflab.errors import PerflabError

from .guards import guards
from .knobs import fitting
from .rebuild import batches_drawn, rebuilt

warnings.filterwarnings("ignore", message="This DataLoader will create")


class _First:
    """The first `most` batches of a batch sampler."""

    def __init__(self, batch_sampler, most: int):
        self.batch_sampler, self.most = batch_sampler, most

    def __len__(self):
        return min(self.most, len(self.batch_sampler))

    def __iter__(self):
        return itertools.islice(iter(self.batch_sampler), self.most)


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
    alarms = {a.guard: {"alarm": f"{a.what} {a.way_out}"} for a in found.alarms}
    return {c.guard: {"state": c.state} | alarms.get(c.guard, {}) for c in found.checks}


def advise(loader: DataLoader, workers: Sequence[int] | None = None, *, study: str = "own.workers") -> Advice:
    """Sweep `num_workers` of loaders like this one; nothing is measured, and nothing advised, behind an alarm.

    workers: by default 0, 1, 2, 4, ... up to four times the usable cores. One call loads batches for about
    a second of one process, at least two for each worker, without any training step; of an iterable dataset
    a whole epoch. What would not fit into shared memory is a row with its reason. Raises PerflabError for a
    loader without a batch.
    """
    found = observe(f"{study}.guards", lambda: _states(loader), variable="guard")
    if Advice(found, None).alarms:
        return Advice(found, None)
    if workers is None:
        workers = [0, *itertools.takewhile(lambda n: n <= 4 * machine.cores(), (2**k for k in range(12)))]
    sampler, count = batches_drawn(loader), 0
    if sampler is not None and len(sampler):
        began = time.perf_counter()
        next(iter(rebuilt(loader, num_workers=0)))
        each_s = time.perf_counter() - began
        count = min(len(sampler), max(2 * max(workers), round(1 / each_s)))
        sampler = _First(sampler, count)
    elif sampler is None:
        count = sum(1 for _ in rebuilt(loader, num_workers=0))
    if not count:
        raise PerflabError("The loader gives no batch: is its dataset empty, or drop_last on?")

    def prepared(n: int) -> DataLoader:
        few = {} if sampler is None else {"batch_sampler": sampler}
        return fitting(rebuilt(loader, num_workers=n, persistent_workers=n > 0, **few))

    result = vary("num_workers", list(workers), _epoch, prepare=prepared, study=study, per="batch", work=count)
    return Advice(found, result)


def _epoch(loader: DataLoader):
    for _ in loader:
        pass
