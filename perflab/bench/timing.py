"""Time one callable. Every way returns raw seconds of single calls; what they say is for `estimate`."""

import contextlib
import gc
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from .intervals import length, union
from .profiler import profiler

L2_FLUSH_BYTES = 256 * 2**20  # more than the L2 of any GPU up to the B200 (126 MiB)


class Samples(dict):
    """A run's own clocks by name: `samples(wait_s=0.2, host_s=0.1)`, each a number or a list of them."""


def samples(**clocks) -> Samples:
    """What a run reports of itself. Raises ValueError for `time_s`, which is the schedule's own clock.

    >>> samples(load_s=0.5)
    {'load_s': 0.5}
    """
    if "time_s" in clocks:
        raise ValueError("time_s is measured already: give your clock another name")
    return Samples(clocks)


def synchronize():
    """Wait for the device, where this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _steady():
    """No garbage collection inside a timed block: its pauses belong to whoever made the garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def wall(call: Callable[[], object], calls: int = 1, blocks: int = 1) -> tuple[list[float], list[Samples]]:
    """Host seconds of one call, the device included: `blocks` figures, each the mean of `calls` calls.

    The device is synchronised before and after each block. Also returns the Samples that calls returned.
    """
    seconds, returned = [], []
    with _steady():
        for _ in range(blocks):
            synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                got = call()
                if isinstance(got, Samples):
                    returned.append(got)
                got = None  # a result that is kept makes the next call take fresh memory
            synchronize()
            seconds.append((time.perf_counter() - began) / calls)
    return seconds, returned


def device(call: Callable[[], object], repeats: int, cold: bool = True) -> list[float]:
    """Device seconds of each of `repeats` calls, by CUDA events on the current stream.

    Before each call the L2 cache is overwritten (`cold`), which also gives the host a head start, so
    that the time to launch is not measured. The method of triton.testing.do_bench.
    """
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if cold else None
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    with _steady():
        torch.cuda.synchronize()
        for start, end in pairs:
            if flush is not None:
                flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]


def busy(call: Callable[[], object]) -> float:
    """Seconds in which the device worked during one call: the union of kernel and copy intervals.

    Read from torch.profiler, which slows the host, not the kernels. nan where the profiler sees no
    device work (WSL, or a driver without CUPTI).
    """
    synchronize()
    with profiler(["CUDA"]) as seen:
        call()
        synchronize()
    return worked(seen.events())


def worked(events) -> float:
    """Seconds in which the device worked, by the events of a torch.profiler; nan where it saw no device work."""
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]
    if not spans:
        return float("nan")
    return length(union(*np.rint(np.array(spans).T * 1000).astype(np.int64))) / 1e9  # torch's times are whole ns


def merge(returned: list[Samples]) -> Mapping[str, list[float]]:
    """The clocks that the calls of one sample reported, as lists by name; empty if they reported none."""
    named: dict[str, list[float]] = {}
    for got in returned:
        for name, value in got.items():
            named.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
    return named


def random_input(*shape: int, dtype=torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal random numbers: zeros draw less power, so that a throttled device runs faster on them."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)
