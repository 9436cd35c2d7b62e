"""Exercises of notebook 03: a loop that overlaps its copies, and the most that hiding a copy can give."""

import math
import random

import torch

from perflab.bench import machine, timing
from perflab.bench.estimate import HOLDS, NOT
from perflab.bench.study import vary
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, numeric, takes

from .transfer import MIB, Pair

BATCHES, BATCH_BYTES, SHARE = 8, 32 * MIB, 0.7


def _batches() -> list[torch.Tensor]:
    """Pinned float32 batches. What they hold is new with every check: memory that an earlier check left
    behind must not pass for a copy that has arrived."""
    empty = [torch.empty(BATCH_BYTES // 4, pin_memory=True) for _ in range(BATCHES)]
    return [x.fill_(1 + k + random.random()) for k, x in enumerate(empty)]


def _at_once(x: torch.Tensor) -> torch.Tensor:
    """Reads the whole batch as soon as the device may: far sooner than the next copy is done."""
    return x.mean()


def _late(pair: Pair):
    """A step that computes for several copies' time and only then reads its batch."""

    def step(x):
        for _ in range(4):
            pair.compute()
        return x.mean()

    return step


def _wrong(answer, step, side) -> int:
    """How many of the results differ from those of a plain loop."""
    batches = _batches()
    expected = [step(x.to("cuda")).item() for x in batches]
    results = answer(batches, step, side)
    torch.cuda.synchronize()
    return sum(not math.isclose(float(a), b, rel_tol=1e-3) for a, b in zip(results, expected, strict=True))


def _overlapped(answer) -> Outcome:
    if wrong := takes(answer, ["batches", "step", "side"]):
        return wrong
    if why := machine.missing("cuda"):
        return Outcome(CANNOT, f"{why}: whether copies overlap, and whether a step reads them too soon, shows there.")
    pair = Pair(BATCH_BYTES, longer=1.3).ready()
    try:
        return _on_device(answer, pair)
    finally:
        pair.close()


def _on_device(answer, pair: Pair) -> Outcome:
    results = answer(_batches(), _at_once, pair.side)  # the memory that it takes is cached, and waits for nothing later
    if not isinstance(results, list | tuple) or len(results) != BATCHES:
        return Outcome(INCORRECT, "it returns a list with what step returned for each batch, in their order.")
    causes = {
        _at_once: "at once: the current stream has to wait for the stream that copies before the step may run.",
        _late(pair): "late: its memory was given to another copy meanwhile. Tell the allocator which stream uses it: "
        "record_stream.",
    }
    for step, cause in causes.items():
        if wrong := _wrong(answer, step, pair.side):
            said = f"{wrong} of {BATCHES} results are wrong when a step reads its batch {cause}"
            return Outcome(INCORRECT, said)
    return _timed(answer, pair)


def _timed(answer, pair: Pair) -> Outcome:
    pinned = [pair.pinned] * (2 * BATCHES)

    def step(x):
        pair.compute()
        return x[:1].clone()  # a view would keep every batch

    loops = {
        "in turn": lambda: [step(x.to("cuda", non_blocking=True)) for x in pinned],
        "overlapped": lambda: answer(pinned, step, pair.side),
        "nothing to copy": lambda: [step(pair.target) for _ in pinned],
    }
    result = vary("loop", loops, lambda loop: loop(), study="03.exercise", budget_s=5)
    timing.synchronize()
    if "overlapped" in result.reasons:
        return Outcome(INCORRECT, f"your loop failed when it was timed: {result.reasons['overlapped']}")
    hidden = result.combine(
        lambda serial, overlapped, bare: (serial - overlapped) / (serial - bare),
        *(("time_s", loop) for loop in ("in turn", "overlapped", "nothing to copy")),
        what="share of the copies that overlapped hides",
    )
    state = hidden.at_least(SHARE).state
    if state == HOLDS:
        return Outcome(CORRECT, f"the same results, and {hidden.mid:.0%} of the copying is hidden.")
    if state == NOT:
        return Outcome(
            INCORRECT,
            f"the results are right, but {max(0, hidden.mid):.0%} of the copying is hidden, and not {SHARE:.0%}: "
            "the next copy must be under way, on a stream of its own, while the step runs.",
        )
    unclear = f"the results are right, but the time cannot tell ({hidden}): check again on a quiet device."
    return Outcome(CANNOT, unclear)


COPY_MS, COMPUTE_MS = 64 * 3 * 224 * 224 * 4 / 20e9 * 1e3, 8.0
GAIN = (COMPUTE_MS + COPY_MS) / COMPUTE_MS

_most = numeric(
    GAIN,
    "the copy disappears behind the computation, which stays: 9.93 ms become 8.",
    [
        (1 / GAIN, "that is the new step as a part of the old; the question is how many times faster."),
        (COPY_MS, "that is how long the copy takes; compare the step with it and the step without."),
        (COPY_MS / (COPY_MS + COMPUTE_MS), "that is a share, f; the bound is the old step over the new one."),
        (1 + COMPUTE_MS / COPY_MS, "it is the copy that hides behind the computation, not the other way round."),
    ],
    "bytes of the batch over bytes a second, then the step with the copy over the one without.",
    example="one number, such as 1.5",
    tolerance=0.006,
)


PROBLEMS = {
    "03.1": Problem(
        "Write overlapped(batches, step, side): copy each batch of a list of pinned tensors to the device, call step "
        "on it, and return the list of results, in order. While a step computes, the next copy must be under way "
        "on the stream side: hide at least 70 % of the copying. step returns before the device is done, and so may "
        "you.",
        _overlapped,
        (
            "Put the copy, with non_blocking=True, inside: with torch.cuda.stream(side). Start the next copy before "
            "you call step.",
            "Before a step: torch.cuda.current_stream().wait_stream(side), but before the next copy is queued there, "
            "or the step waits for that one too.",
            "The batch was allocated on the side stream and is used on another: x.record_stream(current) keeps its "
            "memory from being reused too soon.",
        ),
        """import torch

def overlapped(batches, step, side):
    here, batches, results = torch.cuda.current_stream(), iter(batches), []

    def start():
        batch = next(batches, None)
        if batch is not None:
            with torch.cuda.stream(side):
                return batch.to("cuda", non_blocking=True)

    coming = start()
    while coming is not None:
        here.wait_stream(side)
        coming.record_stream(here)
        batch, coming = coming, start()
        results.append(step(batch))
    return results""",
    ),
    "03.2": Problem(
        "A batch holds 64 images of 3 x 224 x 224 numbers in float32. The bus carries 20 GB/s (1 GB = 10^9 bytes), and "
        "the step computes for 8 ms after the copy. How many times as fast can the loop become at most when the copy "
        "is hidden?",
        _most,
        (
            "How many bytes is the batch, and how long does the bus need for them?",
            "In turn, a step is copy + computation. Overlapped, it is the longer of the two.",
        ),
        "(8 + 64 * 3 * 224 * 224 * 4 / 20e9 * 1e3) / 8",
    ),
}
