"""What is to be measured and for how long: a Job, its Plan, the budget."""

import contextlib
import functools
import hashlib
import inspect
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import machine
from .result import Result, Work
from .settings import budget


@dataclass(frozen=True)
class Plan:
    """How long a schedule goes on. A value has a figure per round; the first round is dropped."""

    enough_rounds: int  # before a narrow interval ends the schedule
    most_rounds: int
    budget_s: float  # ends the schedule, but not before `least_rounds`,
    patience_s: float  # or three budgets, or this, whichever is longer
    width: float = 0.02  # an interval of a log-ratio is narrow at plus or minus this
    least_rounds: int = 6  # below six there is no 95 % interval
    sample_s: float = 0.005  # one value's figure of one round takes at least this long,
    blocks: int = 5  # in this many blocks


PLANS = {
    "quick": Plan(enough_rounds=10, most_rounds=60, budget_s=1.5, patience_s=10),
    "full": Plan(enough_rounds=20, most_rounds=60, budget_s=20, patience_s=60, width=0.01),
}


def plan() -> Plan:
    return PLANS[budget()]


@dataclass(frozen=True)
class Job:
    """All that a schedule needs; travels to another process whole."""

    study: str
    version: int
    variable: str
    values: dict[str, object]
    run: Callable
    prepare: Callable | None = None
    counts: Callable | None = None
    per: str | None = None
    work: Work = 1
    shows: tuple[str, ...] = ()
    fixed: dict = field(default_factory=dict)
    keep: bool = True
    clock: str = "wall"
    plan: Plan = PLANS["quick"]

    @functools.cached_property
    def digest(self) -> str:
        """Of the source of what was measured, so that a changed cell is not taken for the old one."""
        text = repr(sorted(self.values)) + self.clock + str(self.plan)
        for f in (self.run, self.prepare, self.counts):
            with contextlib.suppress(OSError, TypeError):
                text += textwrap.dedent(inspect.getsource(f)) if f else ""
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def work_of(self, name: str) -> float:
        return float(self.work(self.values[name])) if callable(self.work) else float(self.work)

    def empty(self) -> Result:
        return Result(
            self.study,
            self.version,
            self.variable,
            list(self.values),
            fixed=dict(self.fixed),
            per=self.per,
            work={name: self.work_of(name) for name in self.values},
            shows=list(self.shows),
            machine=machine.facts(),
            digest=self.digest,
            taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )


def plain(columns: Mapping) -> dict[str, float | str]:
    """Columns as JSON knows them: scalars of numpy and torch become numbers. Raises TypeError for others."""
    out = {str(name): x.item() if hasattr(x, "item") else x for name, x in columns.items()}
    for name, x in out.items():
        if not isinstance(x, int | float | str):
            raise TypeError(f"{name} is {type(x).__name__}, neither a number nor text")
    return out
