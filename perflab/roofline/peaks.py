"""The roofs of this machine, measured: how fast it copies, and how fast it multiplies matrices in each format.

Operators of a device run below two limits: bytes a second and FLOPs a second. A datasheet prints both; what
torch reaches here is what a program can hope for.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from perflab.bench import machine, timing
from perflab.bench.estimate import Estimate
from perflab.bench.result import Result
from perflab.bench.study import vary
from perflab.bench.timing import random_input
from perflab.bench.units import as_printed
from perflab.errors import PerflabError
from perflab.show.table import Answer, paragraph, table

from .gpus import FORMATS, HERE, Roofs, Sheet
from .precision import matmul_precision

COPY = "copy"
KINDS = (COPY, *FORMATS)
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CAPABILITIES = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9)}  # the least that has it
GIB = 2**30

# -- what is measured


def _roomy() -> bool:
    """Has the GPU 12 GiB or more? On a smaller one the products and the copy are smaller."""
    return (machine.facts()["gpu_bytes"] or math.inf) >= 12 * GIB


def side(kind: str) -> int:
    """Rows of the square matrices whose product gives a roof: 8192 on a GPU with room, less elsewhere."""
    if machine.cuda_devices():
        return 8192 if _roomy() else 4096
    return 1024 if kind == "fp32" or bf16_in_hardware() else 128


def copy_bytes() -> int:
    """Bytes that the copy reads, and writes: several times the last cache, within what the machine has."""
    if machine.cuda_devices():
        return GIB if _roomy() else GIB // 4
    wanted = min(GIB, max(GIB // 8, 4 * int(cpu_cache_bytes() or 0)))
    return max(2**20, min(wanted, machine.ram_bytes() // 8) // 4096 * 4096)


def work(kind: str) -> float:
    """What one call does: bytes read and written by a copy, FLOPs of a product (2 n^3)."""
    return 2.0 * copy_bytes() if kind == COPY else 2.0 * side(kind) ** 3


def bf16_in_hardware() -> bool:
    """Does the processor multiply bf16 itself? Where it does not, torch is slower with it than in fp32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def cpu_cache_bytes() -> float | None:
    """The last cache of the first core, as Linux describes it; None elsewhere."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            sizes.append(float(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
    return max(sizes, default=None)


def device() -> dict[str, dict[str, float]]:
    """Rows for `observe`: the bytes of the last cache of what steps run on; nan where they are not known."""
    on_gpu = machine.cuda_devices()
    known = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", None) if on_gpu else cpu_cache_bytes()
    return {"cache": {"cache_bytes": float(known or math.nan)}}


def in_a_row(call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call among `repeats` in a row, whose caches are warm; on CUDA by events.

    There the device first spins for a while, so that all calls are queued when the first begins: what starting
    them costs the host is not in it.
    """
    if not machine.cuda_devices():
        return timing.wall(call, repeats)[0][0]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(3_000_000)  # cycles: 1.5 ms or more
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def copying(nbytes: int) -> Callable[[], object]:
    """A copy of float32 numbers into memory that is there already, on the device of this machine."""
    x = random_input(nbytes // 4, device=machine.device())
    out = torch.zeros_like(x)  # written once, so that no page is missing
    return lambda: out.copy_(x)


def multiplying(dtype: str, n: int) -> Callable[[], object]:
    """A product of two random n x n matrices of `dtype`. Raises PerflabError where there is none to be had."""
    if why := missing(dtype):
        raise PerflabError(why)
    on = machine.device()
    a, b = (random_input(n, n, device=on, seed=seed) for seed in (0, 1))
    if dtype == "fp8":
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=on)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = a.to(DTYPES[dtype]), b.to(DTYPES[dtype])
    out = torch.empty_like(a)

    def product():
        torch.mm(a, b, out=out)

    precision = {"fp32": "highest", "tf32": "high"}
    return matmul_precision(precision[dtype])(product) if dtype in precision else product


def missing(dtype: str) -> str | None:
    """Why this machine has no roof for `dtype`, or None if it has."""
    if not machine.cuda_devices():
        return None if dtype in ("fp32", "bf16") else f"{dtype} is left out on a processor"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < CAPABILITIES[dtype]:
        return f"no {dtype} in the tensor cores of compute capability {major}.{minor}"
    return None


def prepared(kind: str) -> Callable[[], object]:
    """The call whose rate is the roof of `kind`."""
    return copying(copy_bytes()) if kind == COPY else multiplying(kind, side(kind))


def measure(study: str = "05.roofs", kinds=KINDS, budget_s: float | None = None) -> Result:
    """Time a large copy and a large product in each format, interleaved; the device's clock on CUDA.

    A format that this machine does not offer is a row with the reason. `rate(result, kind)` and
    `of(result)` say what was reached.
    """
    return vary(
        "roof",
        kinds,
        lambda call: call(),
        prepare=prepared,
        work=work,
        study=study,
        clock="device" if machine.cuda_devices() else "wall",
        budget_s=budget_s,
    )


# -- what it says


def unit_of(kind: str) -> str:
    return "bytes/s" if kind == COPY else "flops/s"


def rate(result: Result, kind: str) -> Estimate:
    """bytes/s of the copy, FLOP/s of a product, with its interval."""
    done = result.work.get(kind, math.nan)
    term = ("time_s", kind)
    return result.combine(lambda seconds: done / seconds, term, what=f"{kind} roof", unit=unit_of(kind))


def of(result: Result, device: Result | None = None) -> Roofs:
    """Roofs from a result of `measure`, and the cache from one of `observe("05.device", peaks.device, ...)`.

    Raises PerflabError where the copy was not measured.
    """
    rates = {kind: rate(result, kind) for kind in KINDS if kind in result.values}
    if COPY not in rates or rates[COPY].why:
        raise PerflabError(f"{result.study} holds no copy, and without bytes a second there is no roofline.")
    peaks = {kind: e.mid for kind, e in rates.items() if kind != COPY and not e.why}
    cache = device["cache_bytes"].of("cache").mid if device else math.nan
    name = HERE if result.source == "here" else result.source
    return Roofs(name, rates[COPY].mid, peaks, None if math.isnan(cache) else cache)


@dataclass(frozen=True)
class Beside(Answer):
    """Measured roofs beside printed ones. The plain text is the same on every machine."""

    result: Result
    sheet: Sheet

    def share(self, kind: str) -> float:
        """Measured over printed; nan where either is missing."""
        return rate(self.result, kind).mid / self._printed(kind)

    def _printed(self, kind: str) -> float:
        card = self.sheet.gpu
        printed = {COPY: card.bytes_per_s, **card.peaks} if card else {}
        return printed.get(kind, math.nan)

    def __repr__(self):
        return f"Roofs, measured and printed: {', '.join(self.result.values)}"

    def rows(self) -> list[dict]:
        return [self._row(kind) for kind in self.result.values]

    def _row(self, kind: str) -> dict[str, str]:
        reached, printed, share = rate(self.result, kind), self._printed(kind), self.share(kind)
        ridge = reached.mid / rate(self.result, COPY).mid
        why = self.result.reasons.get(kind, reached.why).removeprefix("prepare: ")
        return {
            "roof": kind,
            "measured": why if reached.why else str(reached),
            "printed": "" if math.isnan(printed) else as_printed(printed, unit_of(kind)),
            "share": "" if math.isnan(share) else f"{share:.0%}",
            "ridge (FLOP/byte)": "" if kind == COPY or math.isnan(ridge) else f"{ridge:.3g}",
        }

    def html(self) -> str:
        return table(self.rows()) + paragraph(self.sheet.sentence) + table([], [self.result.provenance])
