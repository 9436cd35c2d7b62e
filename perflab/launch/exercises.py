"""Exercises of notebook 04: a launch-bound model made fast, busy shares by hand, the levels of a launch."""

import inspect
import math
from collections.abc import Iterable

import torch

from perflab.bench import machine, timing
from perflab.bench.estimate import HOLDS, NOT
from perflab.bench.study import vary
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, as_number

from . import dispatch

HEADS, ROWS, WIDTH, OUT = 64, 16, 32, 8
TIMES = {"cuda": 10, "cpu": 4}


def heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The model of exercise 04.1: x (16, 32), w (64, 32, 8), b (64, 8), all float32; returns (16, 8)."""
    total = torch.zeros(len(x), b.shape[1], device=x.device)
    for i in range(len(w)):
        total = total + torch.relu(x @ w[i] + b[i])
    return total


def _inputs(seed: int, device: str) -> list[torch.Tensor]:
    shapes = [(ROWS, WIDTH), (HEADS, WIDTH, OUT), (HEADS, OUT)]
    return [timing.random_input(*shape, device=device, seed=3 * seed + k) for k, shape in enumerate(shapes)]


def _faster(answer) -> Outcome:
    if not callable(answer):
        return Outcome(INCORRECT, "the answer is a function of x, w and b, as heads is.")
    try:
        inspect.signature(answer).bind(None, None, None)
    except TypeError:
        return Outcome(INCORRECT, "the function takes three arguments: x, w and b.")
    except ValueError:
        pass  # a callable without a signature: calling it will tell
    device = machine.device()
    with torch.no_grad():
        wrong = _wrong(answer, device)
        return Outcome(INCORRECT, wrong) if wrong else _timed(answer, device)


def _wrong(answer, device: str) -> str:
    """What is wrong with the numbers of `answer`, or ""."""
    first, second = _inputs(0, device), _inputs(1, device)
    kept = [x.clone() for x in first]
    got = answer(*first)
    if not isinstance(got, torch.Tensor) or got.shape != (ROWS, OUT):
        seen = f"a tensor {tuple(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
        return f"it returns a tensor ({ROWS}, {OUT}), as heads does, and not {seen}."
    if got.dtype != torch.float32:
        return f"the result is float32, and not {str(got.dtype).removeprefix('torch.')}."
    if not all(torch.equal(x, was) for x, was in zip(first, kept, strict=True)):
        return "it changes its inputs in place: whoever calls it still needs them."
    expected = heads(*first)
    if not _close(got, expected):
        return _which(got, first, expected)
    then, anew = got.clone(), answer(*second)
    if _close(anew, expected) and not _close(anew, heads(*second)):
        return "on new numbers it returns the old result: copy the new numbers into the static inputs of a graph."
    if not _close(anew, heads(*second)):
        return "the first call is right and the second, on new numbers, is wrong: does it keep something of the first?"
    if not torch.equal(got, then):
        return "the next call overwrites the result of the one before: return a clone."
    return ""


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def _which(got: torch.Tensor, inputs: list[torch.Tensor], expected: torch.Tensor) -> str:
    x, w, b = inputs
    if _close(got, torch.relu((x @ w + b[:, None]).sum(0))):
        return "relu belongs to each head, before the sum; the relu of a sum is another number."
    if _close(got, torch.relu(x @ w).sum(0)):
        return "the numbers are those of heads without its bias b."
    if _close(got, expected / HEADS):
        return "the heads are summed, and not averaged."
    worst = float((got - expected).abs().max() / expected.abs().max())
    return f"the numbers differ from those of heads by up to {worst:.2g} of the largest: first right, then fast."


def _timed(answer, device: str) -> Outcome:
    inputs, times = _inputs(2, device), TIMES[device]
    both, threads = {"heads": heads, "yours": answer}, torch.get_num_threads()
    torch.set_num_threads(1)  # operators this small gain nothing from a second, and would wait for a busy core
    try:
        theirs, own = (min(timing.wall(lambda c=call: c(*inputs), blocks=2)[0]) for call in both.values())
        if own > max(0.1, 5 * theirs):  # it would be timed for minutes
            return Outcome(
                INCORRECT, f"the numbers are right, but a call takes {own:.2g} s, and one of heads {theirs:.2g} s."
            )
        seen = vary("model", both, lambda call: call(*inputs), study="04.exercise", budget_s=3)
    finally:
        torch.set_num_threads(threads)
    timing.synchronize()
    if "yours" in seen.reasons:
        return Outcome(INCORRECT, f"your function failed when it was timed: {seen.reasons['yours']}")
    for x in inputs:
        x.mul_(-1)
    if not _close(answer(*inputs), heads(*inputs)):
        return Outcome(
            INCORRECT, "the same tensors with new numbers in them get the old result: it must calculate anew."
        )
    gain = seen.ratio("heads", "yours")
    finding = gain.at_least(times)
    if finding.state == HOLDS:
        return Outcome(CORRECT, f"the same numbers, {gain.mid:.1f} times as fast.")
    if finding.state != NOT:
        return Outcome(
            CANNOT,
            f"the numbers are right, but the time cannot tell whether it is {times} times as fast ({gain}): check "
            "again on a quiet machine.",
        )
    left, whole = (len(dispatch.dispatched(lambda call=call: call(*inputs))) for call in (answer, heads))
    if gain.mid < 1.3:
        return Outcome(
            INCORRECT,
            f"the numbers are right, but it is not faster ({gain.mid:.2f} times as fast): it calls {left} operators, "
            f"and heads calls {whole}.",
        )
    return Outcome(
        INCORRECT,
        f"half way: the same numbers, {gain.mid:.1f} times as fast, and not {times} times. It still calls {left} "
        "operators: can all heads share one?",
    )


SETTINGS = [(5, 10, False), (20, 10, False), (5, 10, True)]  # us a kernel, us a launch, synchronous


def _shares(answer) -> Outcome:
    """The busy share of three settings, in percent."""
    got = [as_number(x) for x in answer] if isinstance(answer, Iterable) else [math.nan]
    if any(map(math.isnan, got)):
        return Outcome(INCORRECT, "the answer is a list of three numbers in percent, such as [25, 50, 75].")
    if len(got) != 3:
        return Outcome(INCORRECT, f"the answer has three numbers, one a setting, and not {len(got)}.")
    right = [100 * k / (k + s if wait else max(k, s)) for k, s, wait in SETTINGS]
    if _near(got, right):
        return Outcome(CORRECT, "the longer of the two sets the pace; only who waits pays for both.")
    if max(got) <= 1 and _near([100 * x for x in got], right):
        return Outcome(INCORRECT, "these are the right shares, but the answer is in percent.")
    if _near(got, [100 - x for x in right]):
        return Outcome(INCORRECT, "that is how idle the device is; the question is how busy.")
    if max(got) > 100:
        return Outcome(
            INCORRECT, "a device is never more than 100 % busy: where kernels are longer, they set the pace."
        )
    for k, name in enumerate(("first", "second")):
        kernel, start, _ = SETTINGS[k]
        if _near([got[k]], [100 * kernel / (kernel + start)]):
            return Outcome(
                INCORRECT,
                f"in the {name} setting the host launches on while the device computes: a period is the longer "
                "of the two, not their sum.",
            )
    if _near([got[2]], [50]):
        return Outcome(INCORRECT, "in the third setting the host waits for each kernel: a period is the sum.")
    wrong = next(k for k in range(3) if not _near([got[k]], [right[k]]))
    return Outcome(
        INCORRECT,
        f"the {('first', 'second', 'third')[wrong]} is not right: the time of a kernel over the period, from one "
        "operator to the next.",
    )


def _near(got: list[float], wanted: list[float]) -> bool:
    return all(math.isclose(a, b, abs_tol=0.4) for a, b in zip(got, wanted, strict=True))


LEVELS = ["thread", "warp", "CTA", "cluster", "grid"]


def _order(answer) -> Outcome:
    """The five levels from the smallest to the largest."""
    if not isinstance(answer, list | tuple) or not all(isinstance(x, str) for x in answer):
        return Outcome(INCORRECT, f"the answer is a list of five words, such as {sorted(LEVELS, key=str.lower)}.")
    got = [{"block": "cta", "thread block": "cta"}.get(x.strip().lower(), x.strip().lower()) for x in answer]
    wanted = [x.lower() for x in LEVELS]
    if sorted(got) != sorted(wanted):
        return Outcome(INCORRECT, f"use each of these once: {', '.join(sorted(LEVELS, key=str.lower))}.")
    if got == wanted:
        return Outcome(CORRECT, "and a CTA is a thread block: the two words mean the same thing.")
    if got == wanted[::-1]:
        return Outcome(INCORRECT, "that is the order from the largest to the smallest.")
    if got.index("cta") > got.index("cluster"):
        return Outcome(INCORRECT, "a CTA is one thread block, not a group of them; the group is called a cluster.")
    if got.index("warp") > got.index("cta"):
        return Outcome(INCORRECT, "a CTA is made of warps: 32 threads each, up to 1024 threads together.")
    return Outcome(INCORRECT, "threads make warps, warps make one CTA; go on from there to the whole launch.")


PROBLEMS = {
    "04.1": Problem(
        f"heads, above, is launch-bound: {HEADS} small heads, one after the other. Write a function of x, w and b that "
        f"returns the same numbers, at least {TIMES['cuda']} times as fast on a GPU or {TIMES['cpu']} times on a CPU. "
        "The shapes stay as they are, the numbers do not.",
        _faster,
        (
            "How many operators does one head need, and how many do all of them? Count with dispatched(...).",
            "x @ w multiplies x by all matrices of w at once: w is (64, 32, 8), the result (64, 16, 8).",
            "The bias needs a dimension for the rows: b[:, None] is (64, 1, 8). Relu each head, then sum over heads.",
        ),
        """import torch

def faster(x, w, b):
    return torch.relu(x @ w + b[:, None]).sum(0)""",
    ),
    "04.2": Problem(
        "How busy is the device, in percent, in a long row of alike operators? First: kernels of 5 us, launches of "
        "10 us, asynchronous. Second: kernels of 20 us, launches of 10 us, asynchronous. Third: kernels of 5 us, "
        "launches of 10 us, and the host waits for each kernel. Give a list of three numbers.",
        _shares,
        (
            "How long is it from one operator to the next? That is the period; the kernel's share of it is asked.",
            "Asynchronous, the period is the longer of the two. Synchronous, it is the sum.",
        ),
        "[100 * 5 / 10, 100 * 20 / 20, 100 * 5 / (5 + 10)]",
    ),
    "04.3": Problem(
        "Order these from the smallest to the largest, as a list of words: grid, CTA, thread, cluster, warp.",
        _order,
        (
            "A launch starts a grid; what issues together is a warp.",
            "CTA is PTX's word for a thread block. A cluster is made of several.",
        ),
        '["thread", "warp", "CTA", "cluster", "grid"]',
    ),
}
