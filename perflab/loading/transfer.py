"""Copies between host and device: what notebook 03 measures with. Nothing here touches a device on import.

DataLoader workers may import this file: torch and perflab.bench may enter, nothing that draws or teaches.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from perflab.bench import machine, timing
from perflab.bench.units import nbytes_of

MIB = 2**20
# Gigabits a second of one lane, by generation: transfers, and the share of them that is payload (8b/10b, 128b/130b,
# then flits). Source: PCI Express Base Specification 6.0, section 1.2; overheads of packets are not in it.
_LANE_GBIT_PER_S = {
    1: 2.5 * 8 / 10,
    2: 5 * 8 / 10,
    3: 8 * 128 / 130,
    4: 16 * 128 / 130,
    5: 32 * 128 / 130,
    6: 64 * 242 / 256,
}


def grid(ways: Sequence[str], sizes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Values for `vary`, each way at each size: {"pinned 4 KiB": ("pinned", 4096), ...}."""
    return {f"{way} {size}": (way, nbytes_of(size)) for way, size in itertools.product(ways, sizes)}


def random_bytes(nbytes: int) -> torch.Tensor:
    """uint8 tensor (nbytes,) of random bytes in ordinary, pageable memory; every page of it is touched."""
    return torch.empty(-(-nbytes // 8), dtype=torch.int64).random_().view(torch.uint8)[:nbytes]


@contextlib.contextmanager
def locked(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The pages of a CPU tensor locked where they lie, for the time of a `with`: cudaHostRegister.

    Raises RuntimeError where CUDA refuses, and whatever torch raises where there is no CUDA.
    """
    runtime = torch.cuda.cudart()
    if (fault := int(runtime.cudaHostRegister(x.data_ptr(), x.nbytes, 0))) != 0:
        raise RuntimeError(f"cudaHostRegister refused {x.nbytes} bytes (CUDA error {fault})")
    try:
        yield x
    finally:
        torch.cuda.synchronize()  # no copy may be under way when its source is unlocked
        runtime.cudaHostUnregister(x.data_ptr())


def lane_bytes_per_s(generation: int, lanes: int) -> float:
    """Bytes a second in one direction of a PCI Express link; nan for a generation that is not known here."""
    return _LANE_GBIT_PER_S.get(generation, math.nan) * 1e9 / 8 * lanes


def bus() -> dict[str, dict[str, float]]:
    """Rows for `observe`: what the link between host and device can carry, as the driver describes it.

    Columns: generation, lanes, bytes_per_s in one direction. No row where the driver does not say, as with
    a device that is not on PCI Express.
    """
    with machine.nvml() as nv:
        if nv is None:
            return {}
        try:
            handle = machine.nvml_handle(nv)
            generation = nv.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            lanes = nv.nvmlDeviceGetMaxPcieLinkWidth(handle)
        except nv.NVMLError:
            return {}
    rate = lane_bytes_per_s(generation, lanes)
    return {"PCIe": {"generation": generation, "lanes": lanes, "bytes_per_s": rate}} if rate > 0 else {}


class Pair:
    """A copy to the device and a computation that lasts `longer` times as long, sized on this machine.

    `ready()` builds it once: `pageable` and `pinned`, uint8 tensors (nbytes,) on the host; `target`, the
    same on the device; `side`, a stream; `compute()`, fp32 matrix products on the current stream.
    """

    def __init__(self, nbytes: int, longer: float = 1.0, width: int = 1024):
        self.nbytes, self.longer, self.width = nbytes, longer, width
        self.repeats = 0

    def ready(self) -> "Pair":
        if not self.repeats:
            self.pageable = random_bytes(self.nbytes)
            self.pinned = self.pageable.pin_memory()
            self.target = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
            self.side = torch.cuda.Stream()
            self._a, self._b = (timing.random_input(self.width, self.width, device="cuda", seed=s) for s in (0, 1))
            self._out = torch.empty_like(self._a)
            copy_s = _fastest(lambda: self.target.copy_(self.pinned, non_blocking=True))
            product_s = _fastest(self._multiply, calls=10)
            self.repeats = max(1, round(self.longer * copy_s / product_s))
        return self

    def _multiply(self):
        torch.mm(self._a, self._b, out=self._out)

    def compute(self):
        for _ in range(self.repeats):
            self._multiply()

    def close(self):
        """Give the memory back; `ready()` would build it anew."""
        self.repeats = 0
        self.pageable = self.pinned = self.target = self.side = self._a = self._b = self._out = None


def _fastest(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one call, the least of a few blocks after two to warm up."""
    timing.wall(call, calls, blocks=2)
    return min(timing.wall(call, calls, blocks=7)[0])
