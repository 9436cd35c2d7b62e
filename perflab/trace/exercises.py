"""The exercises of notebook 06_profiler: faults to be named in recorded traces, and a loop that waits too often."""

import functools
from collections.abc import Mapping

import numpy as np
import torch

from perflab import paths
from perflab.launch import waits
from perflab.learn.question import CORRECT, INCORRECT, Outcome, Problem, takes

from . import faults, gaps
from .trace import Trace, read_trace

FILES = {"A": "pageable_copies", "B": "host_work", "C": "peak_in_backward"}
PLANTED = {"A": faults.PAGEABLE, "B": faults.HOST, "C": faults.MEMORY}
CAUSES = {faults.TINY: gaps.HOST, faults.SYNC: gaps.SYNC, faults.DATA: gaps.DATA, faults.HOST: gaps.HOST}
NAMES = (faults.TINY, faults.SYNC, faults.DATA, faults.PAGEABLE, faults.HOST, faults.ONE_BLOCK, faults.MEMORY)


@functools.cache
def unnamed() -> dict[str, Trace]:
    """Three recorded traces, each with one planted fault: "A", "B" and "C"."""
    return {letter: read_trace(paths.DATA / "traces" / f"{name}.json.gz") for letter, name in FILES.items()}


def _named(answer) -> Outcome:
    if not isinstance(answer, Mapping) or set(answer) != set(FILES):
        return Outcome(INCORRECT, 'the answer is a dict with a name for each trace, such as {"A": "synchronise", ...}.')
    given = {letter: str(name).strip().lower() for letter, name in answer.items()}
    for letter, name in given.items():
        if name not in NAMES:
            return Outcome(INCORRECT, f"{letter}: {name[:40]!r} is none of the names: {', '.join(NAMES)}.")
    wrong = [letter for letter in FILES if given[letter] != PLANTED[letter]]
    if wrong:
        right = len(FILES) - len(wrong)
        return Outcome(INCORRECT, f"{right} of {len(FILES)} are right. {_against(wrong[0], given[wrong[0]])}")
    planted = ((letter, fault) for letter, trace in unnamed().items() for fault in trace.findings)
    sentences = [f"{letter}: {fault.sentence}" for letter, fault in planted if fault.name == PLANTED[letter]]
    return Outcome(CORRECT, " ".join(sentences))


def _against(letter: str, name: str) -> str:
    """What in the trace speaks against a name."""
    trace = unnamed()[letter]
    share = trace.idle.get(CAUSES.get(name), 0.0)
    if name == faults.TINY and share > 0.1:
        longest = max(gap.length_s for gap in trace.gaps if gap.cause == gaps.HOST)
        return (
            f"{letter} is not {name}: the device is idle {share:.0%} of the time for the host, but in few long "
            f"gaps, the longest {1e3 * longest:.1f} ms: what does the host do in them?"
        )
    if name == faults.HOST and trace.peak is not None:
        return (
            f"{letter} was not planted with {name}: that explains {share:.0%} of the time. This trace has "
            "something that the others lack: allocations were recorded."
        )
    copied = trace.durations[trace.is_pageable].sum() / trace.span_ns
    evidence = {
        faults.PAGEABLE: f"its copies are {copied:.0%} of its time",
        faults.ONE_BLOCK: f"kernels with few blocks run in {trace.small_share:.0%} of its busy time",
        faults.MEMORY: "allocations were not recorded",
    }
    idle = (
        f"gaps with that cause are {share:.0%} of the time, and the device is busy {trace.busy_share:.0%} of the time"
    )
    return f"{letter} is not {name}: {evidence.get(name, idle)}."


# -- a loop that waits once

STEPS, WIDTH = 12, 16


def _loop():
    with torch.random.fork_rng(devices=[]):  # the learner's own random numbers go on as they were
        torch.manual_seed(1)
        model = torch.nn.Linear(WIDTH, WIDTH)
        batches = [torch.randn(8, WIDTH) for _ in range(STEPS)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches


def _reference(model, optimizer, batches) -> list[float]:
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _waits_once(answer) -> Outcome:
    if misfit := takes(answer, ("model", "optimizer", "batches")):
        return misfit
    theirs, ours = _loop(), _loop()
    losses, expected = answer(*theirs), _reference(*ours)
    if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
        return Outcome(INCORRECT, "it returns the losses of all steps as a list of Python numbers.")
    if len(losses) != len(expected):
        return Outcome(INCORRECT, f"there are {len(expected)} steps, and you return {len(losses)} losses.")
    trained = all(map(torch.allclose, theirs[0].parameters(), ours[0].parameters()))
    if not trained or not np.allclose(losses, expected, rtol=1e-4, atol=0):
        return Outcome(INCORRECT, "these are not the losses of the plain loop: does every step still train the model?")
    syncs = waits.host_syncs(lambda: answer(*_loop()))
    total = sum(sync.count for sync in syncs)
    if total > 1:
        most = max(syncs, key=lambda sync: sync.count)
        return Outcome(INCORRECT, f"the host would wait {total} times, at {most.place} alone {most.count} times.")
    if total == 0:
        return Outcome(INCORRECT, "no wait was seen: read the losses from tensors, by tolist() for instance, and once.")
    return Outcome(CORRECT, f"the same {len(losses)} losses, and the host waits once.")


PROBLEMS = {
    "06.1": Problem(
        'Three traces were recorded on an H200, each with one planted fault: unnamed() gives them as "A", "B" '
        'and "C". Name the faults: {"A": ..., "B": ..., "C": ...}, each one of: ' + ", ".join(NAMES) + ".",
        _named,
        (
            "Begin with trace.busy_share. A device that is busy is busy with something: trace.top(3).",
            "Where it is idle, trace.idle has the shares of the causes, and the longest of trace.gaps its place.",
            "Where neither explains much, look at trace.peak: it is there where allocations were recorded.",
        ),
        f"{{letter: trace.findings for letter, trace in unnamed().items()}}  # read the sentences\n{PLANTED!r}",
    ),
    "06.2": Problem(
        "Write trained(model, optimizer, batches): one training step per batch with the loss "
        "model(x).square().mean(), and the losses returned as a list of Python numbers. Over all the batches, the host "
        "may wait for the device once.",
        _waits_once,
        (
            "host_syncs(lambda: trained(model, optimizer, batches)) names the lines that wait, and how often.",
            "Keep the losses as tensors while you train. Keep them detached, or each keeps the graph of its step.",
            "torch.stack(losses).tolist() waits once for all of them.",
        ),
        """import torch

def trained(model, optimizer, batches):
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()""",
    ),
}
