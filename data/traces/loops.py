"""Training loops with one planted fault each: what notebook 06 looks for in their traces.

Each loop is a generator that yields after every step, so that any profiler may stand around it. The sizes
are for a data-center GPU; on a CPU they are a few elements, only to see that the loops run.
"""

import itertools
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.profiler import record_function as phase
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from perflab.bench import timing

Loop = Iterator[None]


def size(device: str, gpu: int, cpu: int) -> int:
    return gpu if device.startswith("cuda") else cpu


def stack(width: int, depth: int, device: str) -> nn.Sequential:
    """Linear layers and ReLUs in bf16: kernels of about 0.2 ms at width 4096 and 4096 rows on an H200."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def rows(n: int, width: int, device: str) -> torch.Tensor:
    return timing.random_input(n, width, device=device).to(torch.bfloat16)


def update(net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One training step in its three phases; the loss stays on the device."""
    with phase("forward"):
        loss = net(x).float().square().mean()
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def largest(h: torch.Tensor) -> float:
    return h.abs().max().item()


def item_each_step(device: str) -> Loop:
    """The largest activation of each layer, and the loss, are read to the host in every step."""
    width = size(device, 4096, 16)
    net, x = stack(width, 8, device), rows(2 * width, width, device)
    blocks = [net[k : k + 2] for k in range(0, len(net), 2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        with phase("forward"):
            h = x
            for block in blocks:
                h = block(h)
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
    width = size(device, 1024, 16)
    batches = [timing.random_input(16 * width, width) for _ in range(4)]
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in itertools.cycle(batches):
        with phase("copy"):
            x = moved(batch, device)
        update(net, x, optimizer)
        yield


def tiny_kernels(device: str) -> Loop:
    """A deep, narrow net on few rows: the host needs longer to launch a kernel than the device to run it."""
    depth = size(device, 20, 3)
    layers = [part for _ in range(depth) for part in (nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32))]
    net, x = nn.Sequential(*layers).to(device), timing.random_input(8, 32, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    while True:
        update(net, x, optimizer)
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
    width, repeats = size(device, 4096, 16), size(device, 256, 1)
    net = stack(width, 6, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in DataLoader(SlowItems(width), batch_size=32):
        x = batch.to(device).to(torch.bfloat16).repeat(repeats, 1)
        update(net, x, optimizer)
        yield


def one_block(device: str) -> Loop:
    """Running sums over two long rows: each row is one thread block, and the other multiprocessors are empty."""
    long = timing.random_input(2, size(device, 1 << 20, 64), device=device)
    while True:
        with phase("forward"):
            total = long
            for _ in range(4):
                total = torch.cumsum(total, dim=1) * 1e-3
        yield


def peak_in_backward(device: str) -> Loop:
    """One checkpoint around the whole net: it is computed twice, and backward holds all that forward let go."""
    width = size(device, 4096, 16)
    net, x = stack(width, 6, device), rows(4 * width, width, device).requires_grad_()
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
    return {word: len(word) for word in sorted(map(str, range(n)))}


def host_work(device: str) -> Loop:
    """Plain Python between the steps, which no annotation names, for longer than the device computes."""
    width = size(device, 4096, 16)
    net, x = stack(width, 2, device), rows(4 * width, width, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        update(net, x, optimizer)
        lengths(size(device, 20_000, 100))
        yield
