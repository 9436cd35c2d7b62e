"""Loops that keep the device busy in different ways: a reader of traces has nothing to say about them."""

import itertools

import torch
from loops import Loop, rows, size, stack, update
from torch import nn
from torch.profiler import record_function as phase

from perflab.bench import timing
from perflab.errors import PerflabError


def matmuls(device: str) -> Loop:
    """Large products back to back."""
    width = size(device, 8192, 32)
    a, b = (rows(width, width, device) for _ in range(2))
    while True:
        with phase("forward"):
            for _ in range(8):
                a = (a @ b).clamp(-1, 1)
        yield


def conv_net(device: str) -> Loop:
    """Convolutions on large images, trained."""
    channels, side = size(device, 128, 4), size(device, 64, 8)
    layers = [part for _ in range(5) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    net = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    x = timing.random_input(size(device, 256, 2), channels, side, side, device=device)
    x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        update(net, x, optimizer)
        yield


def elementwise(device: str) -> Loop:
    """Bound by memory bandwidth: no kernel computes much, and all of them fill the device."""
    x = timing.random_input(size(device, 1 << 27, 64), device=device)
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
            update(net, x, optimizer)
            yield


def graphed(device: str) -> Loop:
    """A whole training step in a CUDA graph: many kernels, one launch."""
    _only_cuda("graphed", device)
    net, x = stack(1024, 8, device), rows(8192, 1024, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            update(net, x, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(net, x, optimizer)
    while True:
        graph.replay()
        yield


def training(device: str) -> Loop:
    """Transformer blocks under autocast, the loss read every 50 steps."""
    width = size(device, 2048, 16)
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(block, 4, enable_nested_tensor=False).to(device)
    x = timing.random_input(size(device, 64, 2), size(device, 512, 4), width, device=device)
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
