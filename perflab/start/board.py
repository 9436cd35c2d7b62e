"""The scoreboard: how fast the course's loop is after each change, and what is left to gain."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.utils.data import default_collate

from perflab.bench import cleanup, machine, record, timing
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result
from perflab.bench.settings import budget
from perflab.bench.study import vary
from perflab.bench.units import digits
from perflab.errors import PerflabError
from perflab.show.canvas import below_one_another, times
from perflab.show.forms import Rung, Value, ladder
from perflab.show.style import RECORDED
from perflab.show.table import Answer, table

from .loop import Loop, ready_at_start, size

WARM_STEPS, PROFILED_STEPS, SETTLING_STEPS, LEAST_STEPS = 10, 5, 2, 4
LEAST_GAIN = 1.02  # a smaller gain is none
VISIT_S = {"quick": 0.12, "full": 0.6}


def board(chapter: str, loops: Mapping[str, Loop]) -> "Board":
    """Measure loops in the same rounds: the first is the one before, each further one a change of it.

    A visit drops the batches that the workers had ready, times some steps of the loop and the waiting in them, ends
    the workers, and times as many steps of the model alone, on one batch that lies on the device. A loop that
    needs a GPU is a row with its reason where there is none.

    >>> board("00", {"as written": Loop()})  # doctest: +SKIP
    Board 00: as written
    """
    study = f"{chapter}.board"
    result = vary(
        "loop",
        loops,
        _visit,
        prepare=_Ready,
        counts=_Ready.changes,
        study=study,
        work=_batch,
        budget_s=60.0 if budget() == "full" else 2.0,
    )
    return Board(result)


def _batch(loop: Loop) -> int:
    return size().batch


class _Ready:
    """A loop with its model warm, one batch on the device, and the busy seconds of a step of the model alone."""

    def __init__(self, loop: Loop):
        if loop.needs and machine.device() == "cpu":
            raise PerflabError(f"{', '.join(loop.needs)}: measured on a GPU only")
        self.loop, self.trainer, self.loader = loop, loop.trainer(), loop.loader()
        samples = [self.loader.dataset[i] for i in range(min(size().batch, len(self.loader.dataset)))]
        self.batch = [x.to(self.trainer.device) for x in default_collate(samples)]
        with self.trainer.settings():
            self.alone(WARM_STEPS)
            self.busy_s = math.nan
            if self.trainer.device == "cuda":
                self.busy_s = timing.busy(lambda: self.alone(PROFILED_STEPS)) / PROFILED_STEPS

    def alone(self, steps: int) -> float:
        """Seconds of one step without any loading."""
        timing.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(self.batch)
        timing.synchronize()
        return (time.perf_counter() - began) / steps

    def changes(self) -> dict[str, str]:
        return {"changes": ", ".join(f"{name}={value}" for name, value in self.loop.changes().items())}


def _visit(ready: _Ready):
    loop, trainer = ready.loop, ready.trainer
    with trainer.settings():
        running = iter(ready.loader)
        try:
            batches = loop.batches(running)
            for _ in range(ready_at_start(ready.loader)):
                next(batches)
            for _ in range(SETTLING_STEPS):
                trainer.step(next(batches))
            timing.synchronize()
            began, steps, wait_s, enough_s = time.perf_counter(), 0, 0.0, VISIT_S[budget()]
            while steps < LEAST_STEPS or steps % max(1, loop.workers) or time.perf_counter() - began < enough_s:
                asked = time.perf_counter()
                batch = next(batches)
                wait_s += time.perf_counter() - asked
                trainer.step(batch)
                steps += 1
            timing.synchronize()
            step_s = (time.perf_counter() - began) / steps
        finally:
            cleanup.close(running)  # no worker of one loop runs while another is timed
        clocks = {"step_s": step_s, "wait_s": wait_s / steps, "alone_s": ready.alone(steps)}
    return timing.samples(**clocks, **({} if math.isnan(ready.busy_s) else {"busy_s": ready.busy_s}))


@dataclass(frozen=True)
class Board(Answer):
    """Loops beside the one before: rate, limit, share waited, share busy, gain; `result` has the rounds."""

    result: Result

    @property
    def names(self) -> list[str]:
        return self.result.values

    def rate(self, name: str) -> Estimate:
        """Images a second."""
        return self._rate(name, "step_s", "the loop")

    def limit(self, name: str) -> Estimate:
        """Images a second of the model alone, in the same visits."""
        return self._rate(name, "alone_s", "the model alone")

    def _rate(self, name: str, metric: str, what: str) -> Estimate:
        batch = self.result.work[name]
        rate = self.result.combine(lambda s: batch / s, (metric, name), what=f"{what}, {name}")
        return replace(rate, unit="images/s")

    def waited(self, name: str) -> Estimate:
        """The share of a step in which the loop waits for its batch. Where the step does not wait for the device
        this is an upper bound: the device may still work."""
        return self.result["wait_s"].over(self.result["step_s"], name)

    def busy(self, name: str) -> Estimate:
        """The share of time in which the GPU works; without one, the share that is not waited for."""
        if "busy_s" in self.result.samples:
            return self.result["busy_s"].over(self.result["step_s"], name)
        terms = ("wait_s", name), ("step_s", name)
        return self.result.combine(lambda wait, step: 1 - wait / step, *terms, what=f"share in the step, {name}")

    def gain(self, name: str) -> Estimate:
        """How many times as fast as the loop before, in the same rounds."""
        return self.result["step_s"].ratio(self.names[0], name)

    def changes(self, name: str) -> str:
        """What a loop changes of the loop as written: by it one board is linked to the next."""
        return self.result.counts.get(name, {}).get("changes", name)

    @property
    def busy_name(self) -> str:
        return "GPU busy" if "busy_s" in self.result.samples else "in the step"

    def rows(self) -> list[dict]:
        rows = []
        for name in self.names:
            row = {"loop": name, "images/s": str(self.rate(name))}
            if name in self.result.measured:
                row |= {"waited": _share(self.waited(name)), self.busy_name: _share(self.busy(name))}
                row |= {"the model alone": str(self.limit(name)), "times as fast": "1"}
                row["times as fast"] = "1" if name == self.names[0] else str(self.gain(name))
            rows.append(row)
        return rows

    def html(self) -> str:
        others = [Board(result) for result in record.beside(self.result)]
        own = self.rows() if self.result.measured else []
        rows = own + [row | {"loop": f"{row['loop']} ({b.result.source})"} for b in others for row in b.rows()]
        notes = [self.result.provenance, *(b.result.provenance for b in others)]
        return table(rows, notes, {k: RECORDED for k in range(len(own), len(rows))})

    def __repr__(self):
        return f"Board {self.result.study.partition('.')[0]}: {', '.join(self.names)}"

    def __str__(self):
        return "\n".join(", ".join(f"{key} {value}" for key, value in row.items()) for row in self.rows())


def _share(share: Estimate) -> str:
    return share.why or f"{share.mid:.0%}"


# -- all boards so far


def scoreboard(upto: str = "99") -> "Scoreboard":
    """The bars of all boards so far, of the chapters up to `upto`: this machine's, and below it recorded ones'.

    >>> scoreboard("00")
    Scoreboard: the loop so far
    """
    replayed = record.replayed_machine()
    sources = [replayed] if replayed else ["here", *record.machines()]
    return Scoreboard({source: boards for source in sources if (boards := _boards(source, upto))})


def recorded_boards(machine: str) -> "Scoreboard":
    """All boards of a recorded machine."""
    return Scoreboard({machine: _boards(machine, "99")})


def _boards(source: str, upto: str) -> list[Board]:
    results = []
    for chapter in (f"{n:02}" for n in range(14)):
        if chapter > upto[:2]:
            break
        study = f"{chapter}.board"
        if source == "here":
            results += [Result.from_json(entry) for entry in list(record.entries("results", study))[-1:]]
        else:
            results += filter(None, [record.recorded(source, study, 1, {})])
    return [Board(result) for result in results if result.measured]


@dataclass(frozen=True)
class Scoreboard:
    """The ladder of each machine, by its name."""

    boards: Mapping[str, list[Board]]

    def rungs(self, source: str) -> list[Rung]:
        """Each loop once. The gain in all is the product of the gains, each from rounds of its own board.

        A board whose first loop is none of the board before starts anew from 1.
        """
        rungs, reached = [], {}
        for one in self.boards[source]:
            first, *rest = (name for name in one.names if name in one.result.measured)
            start = reached.get(one.changes(first))
            if start is None:
                rungs.append(self._rung(one, first, 1.0))
            reached = {one.changes(first): start or 1.0}
            for name in rest:
                in_all = reached[one.changes(first)] * one.gain(name).mid
                reached[one.changes(name)] = in_all
                rungs.append(self._rung(one, name, in_all))
        return rungs

    def _rung(self, one: Board, name: str, in_all: float) -> Rung:
        rate, before = one.rate(name), one.names[0]
        gained = name == before or one.gain(name).lo > LEAST_GAIN
        value = Value(rate.mid, rate.lo, rate.hi)
        limit, share = one.limit(name).mid, one.busy(name).mid
        return Rung(name, value, digits(rate.mid), limit, times(in_all), share, gained)

    def _repr_mimebundle_(self, include=None, exclude=None):
        if not self.boards:
            return {"text/plain": repr(self)}
        return below_one_another([self.picture(source) for source in self.boards], repr(self))._repr_mimebundle_()

    def picture(self, source: str):
        """The ladder of one machine."""
        rungs, last = self.rungs(source), self.boards[source][-1]
        left = rungs[-1].limit / rungs[-1].value.mid
        name = "this machine" if source == "here" else machine.processor(last.result.machine)
        sentence = f"Without any loading the model alone would run {times(left)} as fast."
        if len(rungs) > 1:
            sentence = f"The loop runs {rungs[-1].gain} as fast as it was written. {sentence}"
        return ladder(
            f"The loop so far: images/s on {name}",
            sentence,
            rungs,
            share=last.busy_name,
            limit="the model alone, without loading",
            note="Each gain is measured in rounds of its own board; the gain in all is their product.",
        )

    def __repr__(self):
        return "Scoreboard: the loop so far"
