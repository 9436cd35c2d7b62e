"""Thread, warp, CTA, cluster, grid: what this device says of them, and what its blocks can do together.

The driver is asked through ctypes, and a small kernel of our own is compiled by NVRTC. Both happen in a
process of its own, since a wrong call would take its process down.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable

import torch

from perflab.bench import machine, process
from perflab.errors import PerflabError, first_line

THREADS = 128  # of each block of the kernel below
PATIENCE_CYCLES = 20_000_000  # some ten milliseconds: a block that waits in vain must not hang the device
TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE of cuda.h

# Device attributes by their number in cuda.h, enum CUdevice_attribute.
_ATTRIBUTES = {
    "threads_a_cta": 1,
    "ctas_a_grid": 5,
    "threads_a_warp": 10,
    "sms": 16,
    "threads_an_sm": 39,
    "cooperative_launch": 95,
    "ctas_an_sm": 106,
    "cluster_launch": 120,
}

# Every block notes its multiprocessor and the grid's size by the names of PTX, then waits for all others: a
# barrier made of one number in memory. `patience` bounds the wait.
_MEET = r"""
extern "C" __global__ void meet(int *arrived, int *met, int *sm, int *ctas, int blocks, long long patience) {
    if (threadIdx.x != 0) return;
    unsigned here, cta, all;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(here));
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(all));
    sm[blockIdx.x] = (int)here;
    ctas[blockIdx.x] = cta == blockIdx.x ? (int)all : -1;
    atomicAdd(arrived, 1);
    long long began = clock64();
    while (atomicAdd(arrived, 0) < blocks)
        if (clock64() - began > patience) return;
    atomicAdd(met, 1);
}
"""


def levels() -> dict[str, dict]:
    """Rows for `observe`: the levels from the smallest to the largest, as this device has them. Needs CUDA.

    Columns: is, waits_by (how its members wait for each other), and threads (the most).
    """
    facts = _asked(_facts)
    warp, cta = facts["threads_a_warp"], facts["threads_a_cta"]
    rows = {
        "thread": ("one course of instructions", "nothing to wait for", 1),
        "warp": ("threads that issue together", "__syncwarp", warp),
        "CTA = thread block": ("warps on one SM, with shared memory", "__syncthreads", cta),
        "cluster": ("CTAs on neighbouring SMs (Hopper and newer)", "cluster.sync", "as its CTAs"),
        "grid": ("all CTAs of a launch", "its end, or grid.sync in a cooperative launch", "as its CTAs"),
    }
    return {level: dict(zip(("is", "waits_by", "threads"), row, strict=True)) for level, row in rows.items()}


def device_facts() -> dict[str, dict]:
    """Rows for `observe`: the figures of this device that bound a launch, by the driver. Needs CUDA.

    largest_cluster is in CTAs, 0 where there are no clusters; ctas_at_once is how many of 128 threads the device
    holds; what ends in _launch is 1 for yes and 0 for no.
    """
    return {name: {"reads": x} for name, x in _asked(_facts).items()}


def meetings() -> dict[str, dict]:
    """Rows for `observe`: grids whose blocks all wait for each other, by the way they are launched. Needs CUDA.

    Columns: launched ("yes", or that it was refused as too large), met ("all" or "not all" of the blocks),
    every_sm ("yes" where each multiprocessor had a block), blocks_a_cta (the grid's blocks over the CTAs that
    PTX counts). Where no kernel of ours can be compiled, only the reason.
    """
    return _asked(_meetings)


def _asked(question: Callable[[], dict]) -> dict:
    """The answer of the driver, in a process of its own. Raises PerflabError where there is none."""
    if why := machine.missing("cuda"):
        raise PerflabError(f"The driver could not be asked: {why}.")
    return process.call(question)


# -- in the process of its own


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    ]


class _Driver:
    """The CUDA driver's C interface, and the kernel `meet` once it is compiled."""

    def __init__(self):
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the primary context, current in this thread
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.device = ctypes.c_int()
        _check(self.lib.cuCtxGetDevice(ctypes.byref(self.device)), "to ask for the device")

    def attributes(self) -> dict[str, int]:
        values, value = {}, ctypes.c_int()
        for name, number in _ATTRIBUTES.items():
            fault = self.lib.cuDeviceGetAttribute(ctypes.byref(value), number, self.device)
            values[name] = value.value if fault == 0 else 0  # an older driver does not know the newer ones
        return values

    def compile(self):
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")  # torch wants a name of it, and needs no file of it
        self.kernel = torch.cuda._compile_kernel(_MEET, "meet")
        function = self.kernel.func
        self.function = function if isinstance(function, ctypes.c_void_p) else ctypes.c_void_p(function)

    def fits(self) -> int:
        """Blocks of the kernel that can be on one multiprocessor at once."""
        n, ask = ctypes.c_int(), self.lib.cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(ask(ctypes.byref(n), self.function, THREADS, ctypes.c_size_t(0)), "to ask what fits")
        return n.value

    def largest_cluster(self) -> int:
        """Blocks of the largest cluster that needs no special permission; 0 where the driver cannot say."""
        n, config = ctypes.c_int(), _Config(1024, 1, 1, THREADS, 1, 1, 0, None, None, 0)
        ask = getattr(self.lib, "cuOccupancyMaxPotentialClusterSize", None)
        return n.value if ask and ask(ctypes.byref(n), self.function, ctypes.byref(config)) == 0 else 0

    def meet(self, blocks: int, cooperative: bool, sms: int) -> dict:
        """Launch the kernel with so many blocks, and say what became of them."""
        arrived, met = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        sm, ctas = (torch.full((blocks,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
        values = [ctypes.c_void_p(t.data_ptr()) for t in (arrived, met, sm, ctas)]
        values += [ctypes.c_int(blocks), ctypes.c_longlong(PATIENCE_CYCLES)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = [self.function, blocks, 1, 1, THREADS, 1, 1, 0, stream, pointers]
        torch.cuda.synchronize()
        if cooperative:
            fault = self.lib.cuLaunchCooperativeKernel(*arguments)
        else:
            fault = self.lib.cuLaunchKernel(*arguments, None)
        if fault == TOO_LARGE:
            return {"launched": "refused: too large", "met": "none", "every_sm": "no", "blocks_a_cta": 0.0}
        _check(fault, f"to launch {blocks} blocks")
        torch.cuda.synchronize()
        counted = set(ctas.tolist())
        return {
            "launched": "yes",
            "met": "all" if met.item() == blocks else "not all",
            "every_sm": "yes" if len(set(sm.tolist())) == sms else "no",
            "blocks_a_cta": blocks / counted.pop() if len(counted) == 1 else 0.0,
        }


def _check(fault: int, what: str):
    if fault:
        raise RuntimeError(f"the driver failed {what}: CUDA error {fault}")


def _facts() -> dict[str, int]:
    driver = _Driver()
    facts = driver.attributes() | {"largest_cluster": 0}
    on_an_sm = min(facts["ctas_an_sm"], facts["threads_an_sm"] // THREADS)
    with contextlib.suppress(Exception):  # without our kernel, the attributes alone have to do
        driver.compile()
        on_an_sm = driver.fits()
        facts["largest_cluster"] = driver.largest_cluster() if facts["cluster_launch"] else 0
    return facts | {"ctas_at_once": facts["sms"] * on_an_sm}


def _meetings() -> dict[str, dict]:
    driver = _Driver()
    try:
        driver.compile()
    except Exception as e:
        return {"not tried": {"why": f"no kernel of ours could be compiled: {first_line(e)}"}}
    sms = driver.attributes()["sms"]
    fit = driver.fits() * sms
    return {
        "ordinary, half of what fits": driver.meet(fit // 2, False, sms),
        "ordinary, twice what fits": driver.meet(2 * fit, False, sms),
        "cooperative, what fits": driver.meet(fit, True, sms),
        "cooperative, one block more": driver.meet(fit + 1, True, sms),
    }
