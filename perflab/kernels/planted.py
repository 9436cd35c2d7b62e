"""Training loops with one planted fault each, and healthy ones; `python -m perflab.kernels.planted OUT` records them.

Each loop is a generator that yields after every step, so that any profiler may stand around it. The sizes
are for a data-center GPU; on a CPU they are a few elements, only to see that the loops run.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import record_function as phase
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from perflab.bench import timing
from perflab.errors import PerflabError

from .trim import exported, trimmed, write

WAIT, WARMUP, ACTIVE = 2, 3, 4

Loop = Iterator[None]


def _size(device: str, gpu: int, cpu: int) -> int:
    return gpu if device.startswith("cuda") else cpu


def _stack(width: int, depth: int, device: str) -> nn.Sequential:
    """Linear layers and ReLUs in bf16: kernels of about 0.2 ms at width 4096 and 4096 rows on an H200."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def _rows(rows: int, width: int, device: str) -> torch.Tensor:
    return timing.random_input(rows, width, device=device).to(torch.bfloat16)


def _update(net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One training step in its three phases; the loss stays on the device."""
    with phase("forward"):
        loss = net(x).float().square().mean()
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# -- planted faults


def largest(h: torch.Tensor) -> float:
    return h.abs().max().item()


def item_each_step(device: str) -> Loop:
    """The largest activation of each layer, and the loss, are read to the host in every step."""
    width = _size(device, 4096, 16)
    net, x = _stack(width, 8, device), _rows(width, width, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        with phase("forward"):
            h = x
            for layer in net:
                h = layer(h)
                largest(h)
            loss = h.float().square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        yield


def moved(batch: torch.Tensor, device: str) -> torch.Tensor:
    return batch.to(device)


def pageable_copies(device: str) -> Loop:
    """Every batch comes from ordinary memory: the host is held until it is staged, and nothing overlaps."""
    width = _size(device, 1024, 16)
    batches = [timing.random_input(16 * width, width) for _ in range(4)]
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in itertools.cycle(batches):
        with phase("copy"):
            x = moved(batch, device)
        _update(net, x, optimizer)
        yield


def tiny_kernels(device: str) -> Loop:
    """A deep, narrow net on few rows: the host needs longer to launch a kernel than the device to run it."""
    depth = _size(device, 20, 3)
    layers = [part for _ in range(depth) for part in (nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32))]
    net, x = nn.Sequential(*layers).to(device), timing.random_input(8, 32, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    while True:
        _update(net, x, optimizer)
        yield


class SlowItems(Dataset):
    """Items that take half a millisecond each, as a decoder would."""

    def __init__(self, width: int):
        self.item = timing.random_input(width)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(5e-4)
        return self.item


def slow_loader(device: str) -> Loop:
    """A DataLoader without workers, slower than the device."""
    width, repeats = _size(device, 2048, 16), _size(device, 256, 1)
    net = _stack(width, 6, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in DataLoader(SlowItems(width), batch_size=32):
        x = batch.to(device, torch.bfloat16).repeat(repeats, 1)
        _update(net, x, optimizer)
        yield


def one_block(device: str) -> Loop:
    """Running sums over two long rows: each row is one thread block, and the other multiprocessors are empty."""
    rows = timing.random_input(2, _size(device, 1 << 20, 64), device=device)
    while True:
        with phase("forward"):
            total = rows
            for _ in range(4):
                total = torch.cumsum(total, dim=1) * 1e-3
        yield


def peak_in_backward(device: str) -> Loop:
    """One checkpoint around the whole net: it is computed twice, and backward holds all that forward let go."""
    width = _size(device, 2048, 16)
    net, x = _stack(width, 12, device), _rows(8 * width, width, device).requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        with phase("forward"):
            loss = checkpoint(net, x, use_reentrant=False).float().square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
            x.grad = None
        yield


def lengths(n: int) -> dict[str, int]:
    return {word: len(word) for word in " ".join(str(k) for k in range(n)).split()}


def host_work(device: str) -> Loop:
    """Plain Python between the steps, which no annotation names, for longer than the device computes."""
    width = _size(device, 4096, 16)
    net, x = _stack(width, 2, device), _rows(width, width, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        _update(net, x, optimizer)
        lengths(_size(device, 60_000, 100))
        yield


# -- healthy controls


def matmuls(device: str) -> Loop:
    """Large products back to back."""
    width = _size(device, 8192, 32)
    a, b = (_rows(width, width, device) for _ in range(2))
    while True:
        with phase("forward"):
            for _ in range(8):
                a = (a @ b).clamp(-1, 1)
        yield


def conv_net(device: str) -> Loop:
    """Convolutions on large images, trained."""
    channels, side = _size(device, 128, 4), _size(device, 64, 8)
    layers = [part for _ in range(5) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    net = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    x = timing.random_input(_size(device, 256, 2), channels, side, side, device=device)
    x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        _update(net, x, optimizer)
        yield


def elementwise(device: str) -> Loop:
    """Bound by memory bandwidth: no kernel computes much, and all of them fill the device."""
    x = timing.random_input(_size(device, 1 << 27, 64), device=device)
    while True:
        with phase("forward"):
            y = x
            for _ in range(6):
                y = torch.relu(y + 0.5) * 0.9
        yield


def prefetching(device: str) -> Loop:
    """Pinned batches that come on a stream of their own while the device computes."""
    _only_cuda("prefetching", device)
    batches = [timing.random_input(16384, 1024).pin_memory() for _ in range(4)]
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    coming = None
    for batch in itertools.cycle(batches):
        here.wait_stream(side)
        x = coming
        with phase("prefetch"), torch.cuda.stream(side):
            coming = batch.to(device, non_blocking=True)
        if x is not None:
            x.record_stream(here)
            _update(net, x, optimizer)
            yield


def graphed(device: str) -> Loop:
    """A whole training step in a CUDA graph: many kernels, one launch."""
    _only_cuda("graphed", device)
    net, x = _stack(1024, 8, device), _rows(8192, 1024, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _update(net, x, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _update(net, x, optimizer)
    while True:
        graph.replay()
        yield


def training(device: str) -> Loop:
    """A transformer block under autocast, the loss read every 50 steps."""
    width = _size(device, 1024, 16)
    net = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True).to(device)
    x = timing.random_input(_size(device, 64, 2), _size(device, 512, 4), width, device=device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.startswith("cuda"))
    for k in itertools.count():
        with phase("forward"), torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = net(x).float().square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if k % 50 == 49:
            loss.item()
        yield


def _only_cuda(name: str, device: str):
    if not device.startswith("cuda"):
        raise PerflabError(f"The loop {name!r} needs a CUDA device: it is about streams or graphs of one.")


# -- recording


class Plan(NamedTuple):
    """How a loop is recorded. Python frames and memory cost time, so only where the fault's place needs them."""

    loop: Callable[[str], Loop]
    stack: bool = False
    memory: bool = False


FAULTS = {
    "item_each_step": Plan(item_each_step, stack=True),
    "pageable_copies": Plan(pageable_copies, stack=True),
    "tiny_kernels": Plan(tiny_kernels),
    "slow_loader": Plan(slow_loader, stack=True),
    "one_block": Plan(one_block),
    "peak_in_backward": Plan(peak_in_backward, memory=True),
    "host_work": Plan(host_work, stack=True),
}
HEALTHY = {
    "matmuls": Plan(matmuls),
    "conv_net": Plan(conv_net),
    "elementwise": Plan(elementwise),
    "prefetching": Plan(prefetching),
    "training": Plan(training, memory=True),
    "graphed": Plan(graphed),  # last: a capture that fails may spoil the process
}


def record(plan: Plan, device: str, steps: int = ACTIVE) -> torch.profiler.profile:
    """The profiler of `steps` steps of a loop, after WAIT steps without it and WARMUP steps that it drops."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU] + ([activity.CUDA] if device.startswith("cuda") else [])
    loop = plan.loop(device)
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1)
    try:
        with torch.profiler.profile(
            activities=activities, schedule=schedule, with_stack=plan.stack, profile_memory=plan.memory
        ) as profiler:
            for _ in range(WAIT + WARMUP + steps):
                next(loop)
                profiler.step()
    finally:
        loop.close()
    return profiler


def main(arguments: list[str] | None = None) -> int:
    """Writes OUT/<name>.json.gz, trimmed, and OUT/raw/<name>.json.gz, as torch wrote it."""
    plans = FAULTS | HEALTHY
    parser = argparse.ArgumentParser(prog="python -m perflab.kernels.planted", description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(plans)}; all without")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(plans):
        parser.error(f"no loop is called {', '.join(sorted(unknown))}: there are {', '.join(plans)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = 0
    for name in [n for n in plans if n in chosen.names or not chosen.names]:
        try:
            whole = exported(record(plans[name], device))
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
