"""The schedule of a study: what is measured when, and what happens when it fails."""

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Mapping

import torch

from perflab.errors import first_line

from . import cleanup, conditions, device_lock, interrupt, machine, record, timing
from .estimate import interval
from .plan import Job, plain
from .progress import bar
from .result import TWIN, Result
from .settings import budget

WARM_S = 0.05  # shorter calls are made once before they are timed


class Schedule:
    """The rounds of one Job: prepares, visits values in random order, notes conditions, decides when to stop."""

    def __init__(self, job: Job, before_visit=lambda name: None, after_round=lambda result: None, waiting=lambda: None):
        self.job = job
        self.before_visit, self.after_round, self.waiting = before_visit, after_round, waiting
        self.raised: BaseException | None = None  # what ended it, other than an interrupt
        self.result = job.empty()
        self.ready: dict[str, object] = {}
        self.calls: dict[str, int] = {}  # calls in a block; 0: one call is a sample of its own
        self.first_s: dict[str, float] = {}
        self.threads = _usable_threads()
        self.random = random.Random(job.study)
        self.door = interrupt.Interruptible()

    def go(self) -> Result:
        """Measure until the plan is fulfilled. Everything prepared is closed on every path."""
        began, threads = time.perf_counter(), torch.get_num_threads()
        with self.door, contextlib.ExitStack() as self.stack:
            try:
                self._prepare_all()
                self._rounds(began)
                self._count_all()
            except KeyboardInterrupt:
                self.result.stopped = "interrupted"
            except BaseException as e:  # SystemExit, say: what was measured is kept first
                self.raised, self.result.stopped = e, f"ended by {type(e).__name__}"
            finally:
                self._close_all()
        torch.set_num_threads(threads)
        for name in self.job.values:
            if not self.result.samples.get("time_s", {}).get(name):
                self.result.reasons.setdefault(name, f"no round was finished ({self.result.stopped})")
        self.result.seconds = round(time.perf_counter() - began, 3)
        self.result.settings |= {
            "budget": budget(),
            "threads": self.threads,
            "clock": self.job.clock,
            "start_method": machine.start_method(),
        }
        return self.result

    # -- values

    def _enter(self, name: str, stack: contextlib.ExitStack):
        value = self.job.values[name]
        made = self.job.prepare(value) if self.job.prepare else value
        return stack.enter_context(made) if hasattr(made, "__exit__") and self.job.prepare else made

    def _prepare_all(self):
        for name in self.job.values if self.job.keep else ():
            self.before_visit(name)
            try:
                self.ready[name] = self.door.call(self._enter, name, self.stack)
            except Exception as e:
                self._failed(name, "prepare", e)

    def _close_all(self):
        """Closing is shielded from interrupts; what fails to close is said, and the rest is closed."""
        for prepared in self.ready.values():
            self._close(prepared)
        self.ready.clear()
        try:
            self.stack.close()
        except BaseException as e:
            record.once(f"{self.job.study}: a prepared value did not close: {first_line(e)}")
        cleanup.release()

    def _close(self, prepared):
        """Close what `prepare` built; a value that came as it is belongs to the learner."""
        try:
            if self.job.prepare:
                cleanup.close(prepared)
        except BaseException as e:
            record.once(f"{self.job.study}: a prepared value did not close: {first_line(e)}")

    def _failed(self, name: str, when: str, error: Exception):
        self.result.reasons[name] = f"{when}: {first_line(error)}"
        error.__traceback__ = None  # its frames hold tensors and workers
        self._close(self.ready.pop(name, None))
        cleanup.release()

    # -- rounds

    def _rounds(self, began: float):
        watch, idle = None, 0.0
        with bar(self.job.study, "rounds") as shown:
            for number in range(-1, self.job.plan.most_rounds):
                names = [v for v in self._visits() if v.removesuffix(TWIN).strip() not in self.result.reasons]
                if not names:
                    self.result.stopped = "nothing left to measure"
                    return
                self.random.shuffle(names)
                with device_lock.hold(device_lock.device_name(), self._still_waiting) as waited:
                    began, idle = began + waited, idle + waited
                    watch = watch or conditions.Watch(on_gpu=device_lock.device_name() != "cpu")
                    watch.start()
                    for name in names:
                        self._visit(name, number)
                    watch.stop()
                if number < 0:
                    watch.rounds.clear()
                self.result.conditions = watch.summary() | {"waited_s": round(idle, 2)}
                self.after_round(self.result)
                shown.update()
                if stopped := self._done(number + 1, time.perf_counter() - began):
                    self.result.stopped = stopped
                    return
        self.result.stopped = "rounds"

    def _still_waiting(self):
        self.door.check()
        self.waiting()

    def _visits(self) -> list[str]:
        """The values, and from the first kept round on the cheapest one a second time (A/A)."""
        names = list(self.job.values)
        timed = {v: s for v, s in self.first_s.items() if v not in self.result.reasons}
        if not timed:
            return names
        if not any(v.endswith(TWIN) for v in self.calls):
            cheapest = min(timed, key=timed.get)
            self.calls[f"{cheapest} {TWIN}"] = self.calls[cheapest]
            self.result.work[f"{cheapest} {TWIN}"] = self.result.work[cheapest]
        return names + [v for v in self.calls if v.endswith(TWIN)]

    def _visit(self, visit: str, number: int):
        name = visit.removesuffix(TWIN).strip()
        if name in self.result.reasons:
            return
        self.before_visit(name)
        torch.set_num_threads(self.threads)
        try:
            with contextlib.ExitStack() as stack:
                prepared = self.ready[name] if self.job.keep else self.door.call(self._enter, name, stack)
                if not self.job.keep:
                    stack.callback(self._close, prepared)
                seconds, clocks = self.door.call(self._sample, visit, prepared)
            metrics = {m: [_short(x) for x in figures] for m, figures in {"time_s": seconds, **clocks}.items()}
        except Exception as e:
            self._failed(name, f"round {number + 1}", e)
            return
        if number < 0:
            return  # the first round is special: workers start, libraries load, caches fill
        for metric, figures in metrics.items():
            self.result.samples.setdefault(metric, {}).setdefault(visit, []).append((number, figures))

    def _sample(self, visit: str, prepared) -> tuple[list[float], Mapping[str, list[float]]]:
        call = functools.partial(self.job.run, prepared)
        if self.job.clock == "device":
            repeats = self.calls.get(visit) or self._size_device(visit, call)
            return timing.device(call, repeats), {}
        if visit not in self.calls:
            return self._size(visit, call)
        calls = self.calls[visit]
        if self.first_s[visit.removesuffix(TWIN).strip()] < WARM_S:
            call()  # whoever was visited before has left the caches and the clock to this one
        seconds, returned = timing.wall(call, max(1, calls), self.job.plan.blocks if calls else 1)
        return seconds, timing.merge(returned)

    def _size(self, name: str, call):
        """The first visit: how many calls make a sample. The very first call may hold one-time costs."""
        seconds, returned = timing.wall(call)
        once, p = seconds[0], self.job.plan
        if once < 10 * p.sample_s:  # so short a call may have to be repeated in a sample
            once = min(timing.wall(call, blocks=3)[0])
        short = once < p.sample_s / 2
        self.calls[name] = max(1, round(p.sample_s / max(once, 1e-9) / p.blocks)) if short else 0
        self.first_s[name] = once
        return seconds, timing.merge(returned)

    def _size_device(self, name: str, call) -> int:
        timing.device(call, 3)
        once = self.first_s[name] = min(timing.device(call, 5))
        self.calls[name] = max(5, min(100, round(4 * self.job.plan.sample_s / once)))
        return self.calls[name]

    def _done(self, kept: int, spent: float) -> str:
        p = self.job.plan
        if (kept and spent > max(3 * p.budget_s, p.patience_s)) or (spent > p.budget_s and kept >= p.least_rounds):
            return "budget spent"
        if kept >= p.enough_rounds and kept % 5 == 0 and self._narrow():
            return "intervals narrow enough"
        return ""

    def _narrow(self) -> bool:
        times = self.result.samples.get("time_s", {})
        first = next((v for v in times if v not in self.result.reasons), None)
        base = {r: statistics.median(figures) for r, figures in times.get(first, ())}
        for name, rows in times.items():
            logs = [math.log(statistics.median(x) / base[r]) for r, x in rows if r in base]
            _, lo, hi = interval(logs)
            if name != first and (hi - lo) / 2 > self.job.plan.width:
                return False
        return True

    # -- counts

    def _count_all(self):
        """Exact figures, after the timing: trackers slow code many times over."""
        for name in self.job.values if self.job.counts else ():
            if name in self.result.reasons:
                continue
            self.before_visit(name)
            try:
                self.result.counts[name] = self.door.call(self._count, name)
            except Exception as e:
                self._failed(name, "counts", e)

    def _count(self, name: str) -> dict:
        with contextlib.ExitStack() as stack:
            prepared = self.ready[name] if self.job.keep else self._enter(name, stack)
            if not self.job.keep:
                stack.callback(self._close, prepared)
            first, second = (plain(self.job.counts(prepared)) for _ in range(2))
        if first != second:
            raise ValueError(f"two counts of the same work disagree: {first} and {second}")
        return first


def _short(x: float) -> float:
    """Seven significant digits: more would only make files larger."""
    return float(f"{float(x):.7g}")


def _usable_threads() -> int:
    """The intra-op threads in force, at most the usable cores: torch looks at the affinity, not at the quota."""
    return min(torch.get_num_threads(), machine.cores())
