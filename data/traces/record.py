"""Loops with a planted fault each and healthy ones, by name; `python data/traces/record.py OUT` records them."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import healthy
import loops
import torch
from loops import Loop
from trim import trimmed, write

from perflab.bench.profiler import exported, profiler
from perflab.trace import faults

WAIT, WARMUP, ACTIVE = 2, 3, 4


class Plan(NamedTuple):
    """A loop, the fault that its trace must show and a word of its place, and how it is recorded.

    Python frames and memory cost time, so they are recorded only where the fault's place needs them.
    """

    loop: Callable[[str], Loop]
    fault: str = ""
    place: str = ""
    stack: bool = False
    memory: bool = False


FAULTS = {
    "item_each_step": Plan(loops.item_each_step, faults.SYNC, "largest", stack=True),
    "pageable_copies": Plan(loops.pageable_copies, faults.PAGEABLE, "moved", stack=True),
    "tiny_kernels": Plan(loops.tiny_kernels, faults.TINY),
    "slow_loader": Plan(loops.slow_loader, faults.DATA, "__getitem__", stack=True),
    "one_block": Plan(loops.one_block, faults.ONE_BLOCK, "aten::cumsum"),
    "peak_in_backward": Plan(loops.peak_in_backward, faults.MEMORY, "backward", memory=True),
    "host_work": Plan(loops.host_work, faults.HOST, "lengths", stack=True),
}
HEALTHY = {
    "matmuls": Plan(healthy.matmuls),
    "conv_net": Plan(healthy.conv_net),
    "elementwise": Plan(healthy.elementwise),
    "prefetching": Plan(healthy.prefetching),
    "training": Plan(healthy.training, memory=True),
    "graphed": Plan(healthy.graphed),  # last: a capture that fails may spoil the process
}


def record(plan: Plan, device: str, steps: int = ACTIVE) -> torch.profiler.profile:
    """The profiler of `steps` steps of a loop, after WAIT steps without it and WARMUP steps that it drops."""
    loop = plan.loop(device)
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1)
    try:
        with profiler(schedule=schedule, with_stack=plan.stack, profile_memory=plan.memory) as recorded:
            for _ in range(WAIT + WARMUP + steps):
                next(loop)
                recorded.step()
    finally:
        loop.close()
    return recorded


def main(arguments: list[str] | None = None) -> int:
    """Writes OUT/<name>.json.gz, trimmed, and OUT/raw/<name>.json.gz, as torch wrote it."""
    plans = FAULTS | HEALTHY
    parser = argparse.ArgumentParser(prog="python data/traces/record.py", description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(plans)}; all without")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(plans):
        parser.error(f"no loop is called {', '.join(sorted(unknown))}: there are {', '.join(plans)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = 0
    for name in [n for n in plans if n in chosen.names or not chosen.names]:
        try:
            whole = json.loads(exported(record(plans[name], device)))
            write(whole, chosen.out / "raw" / f"{name}.json.gz")
            size = write(trimmed(whole), chosen.out / f"{name}.json.gz")
            print(f"{name}: {len(whole['traceEvents']):,} events, trimmed {size / 1024:.0f} KiB")
        except Exception as error:  # one loop that fails leaves the others
            failed += 1
            print(f"{name}: not recorded: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
        if device == "cuda":
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
