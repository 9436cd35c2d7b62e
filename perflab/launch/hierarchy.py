"""Thread, warp, CTA, cluster, grid: what this device says of them, and what its blocks can do together.

The driver is asked through ctypes, and small kernels of our own are compiled by NVRTC. Both happen in a
process of its own, since a wrong call would take its process down.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys

import torch

from perflab.bench import machine
from perflab.errors import PerflabError

THREADS = 128  # of each block of the kernel below
PATIENCE_CYCLES = 20_000_000  # some ten milliseconds: a block that waits in vain must not hang the device
TIMEOUT_S = 120
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
    asked = _asked("attributes")
    return {
        "thread": {
            "is": "one course of instructions",
            "waits_by": "nothing to wait for",
            "threads": 1,
        },
        "warp": {
            "is": "threads that issue together",
            "waits_by": "__syncwarp",
            "threads": asked["threads_a_warp"],
        },
        "CTA = thread block": {
            "is": "warps on one SM, with shared memory",
            "waits_by": "__syncthreads",
            "threads": asked["threads_a_cta"],
        },
        "cluster": {
            "is": "CTAs on neighbouring SMs (Hopper and newer)",
            "waits_by": "cluster.sync",
            "threads": "as its CTAs",
        },
        "grid": {
            "is": "all CTAs of a launch",
            "waits_by": "its end, or grid.sync in a cooperative launch",
            "threads": "as its CTAs",
        },
    }


def device_facts() -> dict[str, dict]:
    """Rows for `observe`: the figures of this device that bound a launch, by the driver. Needs CUDA.

    largest_cluster is in CTAs, 0 where there are no clusters; ctas_at_once is how many of 128 threads the device
    holds; what ends in _launch is 1 for yes and 0 for no.
    """
    return {name: {"reads": x} for name, x in _asked("attributes").items()}


def meetings() -> dict[str, dict]:
    """Rows for `observe`: grids whose blocks all wait for each other, by the way they are launched. Needs CUDA.

    Columns: launched ("yes", or that it was refused as too large), met ("all" or "not all" of the blocks),
    every_sm ("yes" where each multiprocessor had a block), blocks_a_cta (the grid's blocks over the CTAs that
    PTX counts). Where no kernel of ours can be compiled, only the reason.
    """
    asked = _asked("meetings")
    if "why" in asked:
        return {"not tried": asked}
    return {how: {name: x for name, x in row.items() if name != "blocks"} for how, row in asked.items()}


def _asked(what: str) -> dict:
    """What a fresh process finds out. Raises PerflabError with its last word where it dies or hangs."""
    if why := machine.missing("cuda"):
        raise PerflabError(f"The driver could not be asked: {why}.")
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "perflab.launch.hierarchy", what],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise PerflabError(
            f"The driver could not be asked: no answer within {TIMEOUT_S} s: is another program holding the GPU?"
        ) from None
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise PerflabError(f"The driver could not be asked: {last[:200]}.") from None


# -- in the process of its own


class _Driver:
    """The CUDA driver's C interface; each call that fails raises RuntimeError with its number."""

    def __init__(self):
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the primary context, current in this thread
        self.lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.device = ctypes.c_int()
        self.call("cuCtxGetDevice", ctypes.byref(self.device))

    def call(self, name: str, *args):
        if (fault := getattr(self.lib, name)(*args)) != 0:
            raise RuntimeError(f"{name} failed with CUDA error {fault}")

    def attributes(self) -> dict[str, int]:
        found, value = {}, ctypes.c_int()
        for name, number in _ATTRIBUTES.items():
            fault = self.lib.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), self.device)
            found[name] = value.value if fault == 0 else 0  # an older driver does not know the newer ones
        return found


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    ]


class _Meeting:
    """The kernel `meet`, and what its launches did."""

    def __init__(self, driver: _Driver):
        self.driver = driver
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")  # torch wants a name of it, and needs no file of it
        self.kernel = torch.cuda._compile_kernel(_MEET, "meet")
        self.function = self.kernel.func
        if not isinstance(self.function, ctypes.c_void_p):
            self.function = ctypes.c_void_p(self.function)

    def fits(self) -> int:
        """Blocks of this kernel that can be on one multiprocessor at once."""
        n = ctypes.c_int()
        self.driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(n),
            self.function,
            ctypes.c_int(THREADS),
            ctypes.c_size_t(0),
        )
        return n.value

    def largest_cluster(self) -> int:
        """Blocks of the largest cluster that needs no special permission; 0 where the driver cannot say."""
        n, config = ctypes.c_int(), _Config(1024, 1, 1, THREADS, 1, 1, 0, None, None, 0)
        ask = getattr(self.driver.lib, "cuOccupancyMaxPotentialClusterSize", None)
        return n.value if ask and ask(ctypes.byref(n), self.function, ctypes.byref(config)) == 0 else 0

    def launch(self, blocks: int, cooperative: bool, sms: int) -> dict:
        arrived, met = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        sm, ctas = (torch.full((blocks,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
        values = [ctypes.c_void_p(t.data_ptr()) for t in (arrived, met, sm, ctas)]
        values += [ctypes.c_int(blocks), ctypes.c_longlong(PATIENCE_CYCLES)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        sizes = [ctypes.c_uint(n) for n in (blocks, 1, 1, THREADS, 1, 1, 0)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        if cooperative:
            fault = self.driver.lib.cuLaunchCooperativeKernel(self.function, *sizes, stream, pointers)
        else:
            fault = self.driver.lib.cuLaunchKernel(self.function, *sizes, stream, pointers, None)
        if fault == TOO_LARGE:
            refused = {"launched": "refused: too large", "met": "none", "every_sm": "no", "blocks_a_cta": 0.0}
            return refused | {"blocks": blocks}
        if fault:
            raise RuntimeError(f"the launch of {blocks} blocks failed with CUDA error {fault}")
        torch.cuda.synchronize()
        counted = set(ctas.tolist())
        return {
            "launched": "yes",
            "met": "all" if met.item() == blocks else "not all",
            "every_sm": "yes" if len(set(sm.tolist())) == sms else "no",
            "blocks_a_cta": blocks / counted.pop() if len(counted) == 1 else 0.0,
            "blocks": blocks,
        }


def _attributes() -> dict[str, int]:
    driver = _Driver()
    found = driver.attributes() | {"largest_cluster": 0}
    on_an_sm = min(found["ctas_an_sm"], found["threads_an_sm"] // THREADS)
    with contextlib.suppress(Exception):  # without our kernel, the attributes alone have to do
        meeting = _Meeting(driver)
        on_an_sm = meeting.fits()
        found["largest_cluster"] = meeting.largest_cluster() if found["cluster_launch"] else 0
    return found | {"ctas_at_once": found["sms"] * on_an_sm}


def _meetings() -> dict:
    driver = _Driver()
    try:
        meeting = _Meeting(driver)
    except Exception as e:
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        return {"why": f"no kernel of ours could be compiled: {said[:160]}"}
    sms = driver.attributes()["sms"]
    fit = meeting.fits() * sms
    return {
        "ordinary, half of what fits": meeting.launch(fit // 2, False, sms),
        "ordinary, twice what fits": meeting.launch(2 * fit, False, sms),
        "cooperative, what fits": meeting.launch(fit, True, sms),
        "cooperative, one block more": meeting.launch(fit + 1, True, sms),
    }


if __name__ == "__main__":
    print(json.dumps({"attributes": _attributes, "meetings": _meetings}[sys.argv[1]]()))
