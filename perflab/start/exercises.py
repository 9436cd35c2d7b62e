"""Exercises of notebook 00: a bound before the change, and a loader that loads ahead."""

import math
import threading
import time
from collections.abc import Iterable

from perflab.bench.estimate import HOLDS, NOT
from perflab.bench.study import vary
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, as_number


def _bound(answer) -> Outcome:
    """A step waits 60 ms, copies 5, computes 35: what does a computation twice as fast gain?"""
    if math.isnan(answer := as_number(answer)):
        return Outcome(INCORRECT, "the answer is one number, such as 1.5.")
    exact = 100 / (100 - 35 / 2)
    if math.isclose(answer, exact, rel_tol=0.012):
        return Outcome(CORRECT, "the other 65 ms stay, so that halving the computation gains little.")
    if math.isclose(answer, 1 / exact, rel_tol=0.01) or math.isclose(answer, 100 / exact, rel_tol=0.01):
        return Outcome(INCORRECT, "that is the new step; the question is how many times faster it is.")
    if math.isclose(answer, 2, rel_tol=0.01):
        return Outcome(INCORRECT, "twice as fast is the computation; the waiting and the copy stay as they are.")
    if math.isclose(answer, 1.35, rel_tol=0.01) or math.isclose(answer, 1 / (1 - 0.35), rel_tol=0.01):
        return Outcome(INCORRECT, "that is the bound for a computation that costs nothing; this one is halved.")
    return Outcome(INCORRECT, "add up what one step takes after the change, and divide the old step by it.")


LOAD_S, STEP_S, BATCHES = 0.008, 0.008, 12


class _SlowLoader:
    """A planted loader: each of its batches takes LOAD_S seconds of sleep, which frees the interpreter."""

    def __init__(self):
        self.opened = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        self.opened += 1
        for k in range(BATCHES):
            time.sleep(LOAD_S)
            yield k


class _Failing(_SlowLoader):
    def __iter__(self):
        yield 0
        raise RuntimeError("a damaged file")


def _epoch(batches: Iterable):
    for _ in batches:
        time.sleep(STEP_S)


def _within(seconds: float, work):
    """The result of `work`; TimeoutError if it has none in time. Its thread is left behind, as nothing ends it."""
    outcome: dict = {}

    def run():
        try:
            outcome["value"] = work()
        except BaseException as e:
            outcome["error"] = e

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError("it did not end: does your thread die without telling the loop?")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _prefetched(answer) -> Outcome:
    if not callable(answer):
        return Outcome(INCORRECT, "the answer is a function that takes a loader and yields its batches.")
    got = _within(10, lambda: list(answer(_SlowLoader())))
    if got != list(range(BATCHES)):
        return Outcome(INCORRECT, f"the batches must come whole and in order: 0 to {BATCHES - 1}, not {got}.")
    try:
        _within(10, lambda: list(answer(_Failing())))
        return Outcome(INCORRECT, "an error in the loader must reach the loop; yours swallows it.")
    except RuntimeError as e:
        if "a damaged file" not in str(e):
            return Outcome(INCORRECT, f"an error in the loader must reach the loop as it is, not as {e!r}.")
    kinds = {"in turn": _SlowLoader, "prefetched": lambda: answer(_SlowLoader())}
    seen = vary("loop", kinds, lambda make: _epoch(make()), study="00.exercise", budget_s=5)
    finding = seen.ratio("in turn", "prefetched").at_least(1.4)
    if finding.state == HOLDS:
        return Outcome(CORRECT, "loading and stepping overlap: a step costs the slower of the two, not their sum.")
    if finding.state == NOT:
        return Outcome(
            INCORRECT,
            "same batches, but the loop still loads and steps in turn: the next batch must be on its way "
            "while the step runs.",
        )
    return Outcome(CANNOT, "the batches are right, but this machine is too busy to show a gain: check again later.")


PROBLEMS = {
    "00.1": Problem(
        "A step takes 100 ms: it waits 60 ms for data, copies for 5 ms and computes for 35 ms, one after the "
        "other. You make the computation twice as fast. How many times faster is the step?",
        _bound,
        (
            "What of the 100 ms is touched by the change?",
            "The waiting and the copy stay. What is left of the 35 ms, and what do the three add up to?",
        ),
        "100 / (60 + 5 + 35 / 2)",
    ),
    "00.2": Problem(
        "Write a function that takes a loader and yields the same batches in the same order, but loads the "
        "next batch in a thread while the loop works on the current one. An error in the loader must reach "
        "the loop.",
        _prefetched,
        (
            "A ThreadPoolExecutor with one thread can run next(it) for you; submit it before you yield.",
            "Keep one future ahead: take its result, submit the next one, then yield. StopIteration inside "
            "a thread ends nothing by itself: next(it, end) with a marker of your own tells the end.",
        ),
        """from concurrent.futures import ThreadPoolExecutor

def prefetched(loader):
    batches, end = iter(loader), object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, end)
        while (batch := coming.result()) is not end:
            coming = thread.submit(next, batches, end)
            yield batch""",
    ),
}
