"""Exercises of notebook 00: a bound before the change, and a loader that loads ahead."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool

from perflab.bench.study import vary
from perflab.learn.question import INCORRECT, Outcome, Problem, numeric, takes, timed

_STEP_MS = 60 + 5 + 35 / 2
_NEW_STEP = "that is the new step; the question is how many times faster it is."
_NO_COST = "that is the bound for a computation that costs nothing; this one is halved."
_bound = numeric(
    100 / _STEP_MS,
    "the other 65 ms stay, so that halving the computation gains little.",
    [
        (_STEP_MS, _NEW_STEP),
        (_STEP_MS / 100, _NEW_STEP),
        (2, "twice as fast is the computation; the waiting and the copy stay as they are."),
        (1.35, _NO_COST),
        (100 / 65, _NO_COST),
    ],
    "add up what one step takes after the change, and divide the old step by it.",
    example="one number, such as 1.5",
    tolerance=0.012,
)

LOAD_S, STEP_S, BATCHES = 0.008, 0.008, 12


class _SlowLoader:
    """A planted loader: each of its batches takes LOAD_S seconds of sleep, which frees the interpreter."""

    def __len__(self):
        return BATCHES

    def __iter__(self):
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


def _batches(answer, loader) -> list:
    """What the answer yields. Raises TimeoutError after ten seconds; its thread is left behind, as nothing ends it."""
    with contextlib.closing(ThreadPool(1)) as pool:
        try:
            return pool.apply_async(lambda: list(answer(loader))).get(timeout=10)
        except multiprocessing.TimeoutError:
            raise TimeoutError("it did not end: does your thread die without telling the loop?") from None


def _prefetched(answer) -> Outcome:
    if wrong := takes(answer, ["loader"]):
        return wrong
    batches = _batches(answer, _SlowLoader())
    if batches != list(range(BATCHES)):
        return Outcome(INCORRECT, f"the batches must come whole and in order: 0 to {BATCHES - 1}, not {batches}.")
    try:
        _batches(answer, _Failing())
        return Outcome(INCORRECT, "an error in the loader must reach the loop; yours swallows it.")
    except RuntimeError as e:
        if "a damaged file" not in str(e):
            return Outcome(INCORRECT, f"an error in the loader must reach the loop as it is, not as {e!r}.")
    loaders = {"in turn": _SlowLoader, "prefetched": lambda: answer(_SlowLoader())}
    epochs = vary("loop", loaders, lambda make: _epoch(make()), study="00.exercise", budget_s=5)
    return timed(
        epochs.ratio("in turn", "prefetched"),
        1.4,
        "loading and stepping overlap: a step costs the slower of the two, not their sum.",
        "same batches, but the loop still loads and steps in turn: the next batch must be on its way while the "
        "step runs.",
    )


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
