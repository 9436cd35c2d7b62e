"""Exercises of notebook 04: a launch-bound model made fast, busy shares by hand, the levels of a launch."""

import torch

from perflab.bench import machine, timing
from perflab.bench.study import vary
from perflab.learn.question import CORRECT, INCORRECT, Outcome, Problem, numeric, takes, timed

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
    if outcome := takes(answer, ["x", "w", "b"]):
        return outcome
    device = machine.device()
    with torch.no_grad():
        wrong = _wrong(answer, device)
        return Outcome(INCORRECT, wrong) if wrong else _timed(answer, device)


def _wrong(answer, device: str) -> str:
    """What is wrong with the numbers of `answer`, or ""."""
    first, second = _inputs(0, device), _inputs(1, device)
    originals = [x.clone() for x in first]
    got = answer(*first)
    if not isinstance(got, torch.Tensor) or got.shape != (ROWS, OUT):
        form = f"a tensor {tuple(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
        return f"it returns a tensor ({ROWS}, {OUT}), as heads does, and not {form}."
    if got.dtype != torch.float32:
        return f"the result is float32, and not {str(got.dtype).removeprefix('torch.')}."
    if not all(map(torch.equal, first, originals)):
        return "it changes its inputs in place: whoever calls it still needs them."
    expected = heads(*first)
    if not _close(got, expected):
        return _slip(got, *first, expected)
    result, next_result = got.clone(), answer(*second)
    if not _close(next_result, heads(*second)):
        if _close(next_result, expected):
            return "on new numbers it returns the old result: copy the new numbers into the static inputs of a graph."
        return "the first call is right and the second, on new numbers, is wrong: does it keep something of the first?"
    if not torch.equal(got, result):
        return "the next call overwrites the result of the one before: return a clone."
    return ""


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def _slip(got, x, w, b, expected) -> str:
    slips = [
        (
            torch.relu((x @ w + b[:, None]).sum(0)),
            "relu belongs to each head, before the sum; the relu of a sum is another number.",
        ),
        (torch.relu(x @ w).sum(0), "the numbers are those of heads without its bias b."),
        (expected / HEADS, "the heads are summed, and not averaged."),
    ]
    for numbers, sentence in slips:
        if _close(got, numbers):
            return sentence
    worst = float((got - expected).abs().max() / expected.abs().max())
    return f"the numbers differ from those of heads by up to {worst:.2g} of the largest: first right, then fast."


def _timed(answer, device: str) -> Outcome:
    inputs, times = _inputs(2, device), TIMES[device]
    calls, threads = {"heads": heads, "yours": answer}, torch.get_num_threads()
    torch.set_num_threads(1)  # operators this small gain nothing from a second, and would wait for a busy core
    try:
        theirs, own = (min(timing.wall(lambda call=call: call(*inputs), blocks=2)[0]) for call in calls.values())
        if own > max(0.1, 5 * theirs):  # it would be timed for minutes
            slow = f"the numbers are right, but a call takes {own:.2g} s, and one of heads {theirs:.2g} s."
            return Outcome(INCORRECT, slow)
        result = vary("model", calls, lambda call: call(*inputs), study="04.exercise", budget_s=3)
    finally:
        torch.set_num_threads(threads)
    timing.synchronize()
    if "yours" in result.reasons:
        return Outcome(INCORRECT, f"your function failed when it was timed: {result.reasons['yours']}")
    for x in inputs:
        x.mul_(-1)
    if not _close(answer(*inputs), heads(*inputs)):
        stale = "the same tensors with new numbers in them get the old result: it must calculate anew."
        return Outcome(INCORRECT, stale)
    gain = result.ratio("heads", "yours")
    too_slow = _too_slow(answer, inputs, gain.mid, times) if gain.mid < times else ""
    return timed(gain, times, f"the same numbers, {gain.mid:.1f} times as fast.", too_slow)


def _too_slow(answer, inputs, gain: float, times: int) -> str:
    left, whole = (len(dispatch.dispatched(lambda call=call: call(*inputs))) for call in (answer, heads))
    if gain < 1.3:
        not_faster = f"the numbers are right, but it is not faster ({gain:.2f} times as fast)"
        return f"{not_faster}: it calls {left} operators, and heads calls {whole}."
    half_way = f"half way: the same numbers, {gain:.1f} times as fast, and not {times} times"
    return f"{half_way}. It still calls {left} operators: can all heads share one?"


SETTINGS = [(5, 10, False), (20, 10, False), (5, 10, True)]  # us a kernel, us a launch, synchronous
_LONGER = "the host launches on while the device computes: a period is the longer of the two, not their sum."
_shares = numeric(
    (50, 100, 100 / 3),
    "the longer of the two sets the pace; only who waits pays for both.",
    [
        ((0.5, 1, 1 / 3), "these are the right shares, but the answer is in percent."),
        ((50, 0, 200 / 3), "that is how idle the device is; the question is how busy."),
        ((50, 200, 100 / 3), "a device is never more than 100 % busy: where kernels are longer, they set the pace."),
        ((100 / 3, 100, 100 / 3), f"in the first setting {_LONGER}"),
        ((50, 200 / 3, 100 / 3), f"in the second setting {_LONGER}"),
        ((100 / 3, 200 / 3, 100 / 3), f"in the first and the second setting {_LONGER}"),
        ((50, 100, 50), "in the third setting the host waits for each kernel: a period is the sum."),
    ],
    "not all are right: a share is the time of a kernel over the period, from one operator to the next.",
    example="a list of three numbers in percent, such as [25, 50, 75]",
    tolerance=0.012,
)


LEVELS = ["thread", "warp", "CTA", "cluster", "grid"]


def _order(answer) -> Outcome:
    """The five levels from the smallest to the largest."""
    if not isinstance(answer, list | tuple) or not all(isinstance(x, str) for x in answer):
        return Outcome(INCORRECT, f"the answer is a list of five words, such as {sorted(LEVELS, key=str.lower)}.")
    words = [x.strip().lower() for x in answer]
    words = ["cta" if word in ("block", "thread block") else word for word in words]
    right = [x.lower() for x in LEVELS]
    if sorted(words) != sorted(right):
        return Outcome(INCORRECT, f"use each of these once: {', '.join(sorted(LEVELS, key=str.lower))}.")
    if words == right:
        return Outcome(CORRECT, "and a CTA is a thread block: the two words mean the same thing.")
    if words == right[::-1]:
        return Outcome(INCORRECT, "that is the order from the largest to the smallest.")
    if words.index("cta") > words.index("cluster"):
        return Outcome(INCORRECT, "a CTA is one thread block, not a group of them; the group is called a cluster.")
    if words.index("warp") > words.index("cta"):
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
