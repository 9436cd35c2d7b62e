"""TF32: float32 matrix products on tensor cores, and whether a step has any use for them.

Off by default for matrix products. It helps where float32 products are most of what a busy device does; 16-bit
steps, tiny models and memory-bound ones gain nothing, so that nothing is advised for them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perflab.bench import machine, timing
from perflab.errors import PerflabError

from . import work

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
DOMINANT = 0.5  # of the device's time, and of the step: below, nothing is advised


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision(name) for the time of a `with`: "high" lets float32 products use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def tf32() -> contextlib.AbstractContextManager[None]:
    """Float32 matrix products by TF32 inside the `with`, as before afterwards."""
    return matmul_precision("high")


@dataclass(frozen=True)
class Advice:
    """Whether TF32 is worth a try, and why, in a sentence."""

    advise: bool
    sentence: str

    def __str__(self):
        return self.sentence


def tf32_advice(products_share: float, busy_share: float, capability: tuple[int, int], precision: str) -> Advice:
    """TF32 for this step? Only where float32 matrix products are most of what the device does, and it is busy.

    products_share: of the device's busy time, in float32 matrix products (`float32_products`). busy_share: of the
    step, in which the device is busy. capability: of the device. precision: torch.get_float32_matmul_precision().
    """
    if capability < (8, 0):
        return Advice(False, f"No TF32: it needs capability 8.0, and this device has {capability[0]}.{capability[1]}.")
    if precision != "highest":
        return Advice(False, f"TF32 is on already: the matmul precision is {precision!r}.")
    if math.isnan(products_share + busy_share):
        return Advice(False, "No advice: the profiler sees no work of the device.")
    if busy_share < DOMINANT:
        return Advice(False, f"No TF32: the device is busy in {busy_share:.0%} of the step, so look elsewhere first.")
    if products_share < DOMINANT:
        return Advice(False, f"No TF32: float32 matrix products are {products_share:.0%} of the device's time.")
    part = products_share * busy_share
    return Advice(
        True,
        f"Try torch.set_float32_matmul_precision('high'): float32 matrix products take {part:.0%} of the step. TF32 "
        "rounds their inputs to 10 bits of mantissa, so compare a loss before you keep it.",
    )


class Named(TorchDispatchMode):
    """Puts each matrix product on float32 under a name that the profiler shows."""

    name = "perflab float32 product"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = next((t for t in work.tensors(args)), None)
        product = func._overloadpacket.__name__ in PRODUCTS and first is not None and first.dtype == torch.float32
        with torch.profiler.record_function(self.name) if product else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def float32_products(step: Callable[[], object]) -> tuple[float, float]:
    """(products_share, busy_share) of a step on a CUDA device, for `tf32_advice`.

    Both are read from one trace of torch.profiler, which slows the host and not the kernels: from two, clocks that
    changed between them could make a share above one. The second is over the time of the step unprofiled. nan
    where the profiler sees no device. Raises PerflabError without a CUDA device.
    """
    if why := machine.missing("cuda"):
        raise PerflabError(f"float32_products reads a CUDA device's time: {why}.")
    step()
    wall_s = min(timing.wall(step, blocks=5)[0])
    with timing.profiler() as seen, Named():
        step()
        torch.cuda.synchronize()
    return shares(seen.events(), wall_s)


def shares(events, wall_s: float) -> tuple[float, float]:
    """(products_share, busy_share) from the profiler's events of a step that takes `wall_s` unprofiled."""
    busy_s, host = timing.worked(events), torch.autograd.DeviceType.CPU
    products_us = sum(e.device_time_total for e in events if e.name == Named.name and e.device_type == host)
    return min(products_us / 1e6 / busy_s, 1.0), busy_s / wall_s  # two kernels may overlap by their ends
