"""Copies between host and device: what notebook 03 measures with. Nothing here touches a device on import.

DataLoader workers may import this file: torch and perflab.bench may enter, nothing that draws or teaches.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from perflab.bench import machine, timing
from perflab.bench.estimate import Estimate
from perflab.bench.result import Metric, label
from perflab.errors import PerflabError

MIB = 2**20
_FACTORS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Gigatransfers a second of one lane, and the share of them that is payload: 8b/10b, 128b/130b, then flits.
# Source: PCI Express Base Specification 6.0, section 1.2; overheads of packets are not in it.
_LANE = {
    1: (2.5, 8 / 10),
    2: (5, 8 / 10),
    3: (8, 128 / 130),
    4: (16, 128 / 130),
    5: (32, 128 / 130),
    6: (64, 242 / 256),
}


def nbytes_of(size: str) -> int:
    """ "64 KiB" as bytes. Raises PerflabError for anything else than a number and KiB, MiB or GiB."""
    try:
        number, unit = size.split()
        return int(number) * _FACTORS[unit]
    except (AttributeError, KeyError, ValueError):
        raise PerflabError(f'The size {size!r} is unknown: write it as "64 KiB", "16 MiB" or "1 GiB".') from None


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
    transfers, payload = _LANE.get(generation, (math.nan, math.nan))
    return transfers * 1e9 * payload * lanes / 8


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
            self.repeats = self._sized()
        return self

    def compute(self):
        for _ in range(self.repeats):
            torch.mm(self._a, self._b, out=self._out)

    def close(self):
        """Give the memory back; `ready()` would build it anew."""
        self.repeats = 0
        self.pageable = self.pinned = self.target = self.side = self._a = self._b = self._out = None

    def _sized(self) -> int:
        copy_s = _fastest(lambda: self.target.copy_(self.pinned, non_blocking=True))
        product_s = _fastest(lambda: torch.mm(self._a, self._b, out=self._out), calls=10)
        return max(1, round(self.longer * copy_s / product_s))


def _fastest(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one call, the least of a few blocks after two to warm up."""
    timing.wall(call, calls, blocks=2)
    return min(timing.wall(call, calls, blocks=7)[0])


def over_sum(metric: Metric, value: str, parts: Sequence[str]) -> Estimate:
    """`value` over the sum of `parts`, paired by round: 1 says that they took turns, 0.5 that two equal
    parts overlapped entirely."""
    what = f"{metric.name} of {label(value)} / ({' + '.join(map(label, parts))})"
    rows, why = _paired(metric, [value, *parts])
    if why:
        return Estimate.missing(what, why, metric.source)
    return Estimate.of_ratio([math.log(whole / sum(alone)) for whole, *alone in rows], what, metric.source)


def hidden_share(metric: Metric, overlapped: str, in_turn: str, without: str) -> Estimate:
    """The share of the copying that `overlapped` hides, paired by round: 0 none, 1 all of it.

    `in_turn` copies and computes one after the other, `without` has nothing to copy; their difference is
    what the copies cost. Where it is none, there is nothing to hide and no share.
    """
    what = f"share of the copies that {label(overlapped)} hides"
    rows, why = _paired(metric, [overlapped, in_turn, without])
    if not why and any(serial <= bare for _, serial, bare in rows):
        why = "the copies are too short beside the rest to be seen"
    if why:
        return Estimate.missing(what, why, metric.source)
    return Estimate.of([(serial - seen) / (serial - bare) for seen, serial, bare in rows], what, source=metric.source)


def _paired(metric: Metric, values: Sequence[str]) -> tuple[list[tuple[float, ...]], str]:
    """The figures of all `values` by round, from the rounds that have them all; or why there are none."""
    seen: list[Mapping[int, float]] = [metric.rounds.get(label(v), {}) for v in values]
    for v, rounds in zip(values, seen, strict=True):
        if not rounds:
            return [], metric.of(v).why
    shared = sorted(set.intersection(*map(set, seen)))
    return [tuple(rounds[r] for rounds in seen) for r in shared], "" if shared else "no round has them all"
