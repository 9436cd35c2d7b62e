"""What this computer is and what this process may use of it. Asking creates no CUDA context."""

import contextlib
import functools
import importlib.util
import math
import multiprocessing
import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import psutil

from .settings import budget


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> float:
    """The CPU quota of this process's control group and of every parent, in cores; infinite without one.

    `own` is the text of /proc/self/cgroup. Version 2 writes cpu.max, version 1 cpu.cfs_quota_us.
    """
    best = math.inf
    for line in (_read(Path("/proc/self/cgroup")) if own is None else own).splitlines():
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "cpu" if "cpu" in controllers.split(",") else None
        if base is None:
            continue
        folder = base / path.strip("/")
        for where in [folder, *folder.parents]:
            if controllers:
                words = [_read(where / "cpu.cfs_quota_us"), _read(where / "cpu.cfs_period_us")]
            else:
                words = _read(where / "cpu.max").split()
            with contextlib.suppress(ValueError):
                quota, period = map(int, words)
                best = min(best, quota / period) if quota > 0 else best
            if where == base:
                break
    return best


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def affinity() -> list[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores() -> int:
    """Usable cores: the affinity mask, cut by the control group's quota. At least 1."""
    return max(1, min(len(affinity()), math.ceil(min(cgroup_cpus(), 4096))))


def ram_bytes() -> int:
    """Memory that this process may still take: what is free, cut by the control group's limit."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(ValueError):
        limit = int(_read(Path("/sys/fs/cgroup/memory.max")))
        return min(free, limit - int(_read(Path("/sys/fs/cgroup/memory.current")) or 0))
    return free


def shm_bytes() -> int:
    """Free bytes in /dev/shm, through which DataLoader workers hand over batches; 0 where there is none."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


@contextlib.contextmanager
def nvml():
    """The NVML bindings, initialised, or None where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, no permission: all mean "no NVIDIA GPU to ask"
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def nvml_handle(nv):
    """NVML's handle of torch's current device: by UUID, since CUDA's order need not be NVML's."""
    import torch

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nv.nvmlDeviceGetHandleByUUID(name.encode())


def _text(x) -> str:
    return x.decode() if isinstance(x, bytes) else str(x)


@functools.cache
def gpus() -> tuple[dict, ...]:
    """The NVIDIA GPUs of this machine by NVML: name, memory in bytes, driver."""
    with nvml() as nv:
        if nv is None:
            return ()
        found = []
        for i in range(nv.nvmlDeviceGetCount()):
            handle = nv.nvmlDeviceGetHandleByIndex(i)
            memory = None
            with contextlib.suppress(nv.NVMLError):  # unified memory has no figure of its own
                memory = nv.nvmlDeviceGetMemoryInfo(handle).total
            name = _text(nv.nvmlDeviceGetName(handle))
            found.append({"name": name, "bytes": memory, "driver": _text(nv.nvmlSystemGetDriverVersion())})
        return tuple(found)


@functools.cache
def cuda_devices() -> int:
    """How many CUDA devices torch can use here. Asked through NVML, so that a later fork stays safe."""
    import torch

    if torch.version.cuda is None:
        return 0
    if not torch.cuda.is_initialized():
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device() -> str:
    """Where a step of the course runs: "cuda" where torch can use it, else "cpu"."""
    return "cuda" if cuda_devices() else "cpu"


def start_method(loader=None) -> str:
    """How worker processes start: a DataLoader's own way, else this Python's default. Asking changes nothing."""
    own = getattr(loader, "multiprocessing_context", None)
    if own is not None:
        return own.get_start_method() if hasattr(own, "get_start_method") else str(own)
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def missing(need: str) -> str | None:
    """Why `need` is not met here, or None if it is.

    Needs: "cuda", "2 cuda" (that many devices), "compiler" (C++ and Python.h, for torch.compile), "full budget"
    (what takes too long for the quick one), or the name of a package that can be imported ("torchvision").
    """
    if need == "full budget":
        return None if budget() == "full" else "the quick budget leaves this out: set PERFLAB_BUDGET=full"
    if match := re.fullmatch(r"(?:(\d+) )?cuda", need):
        wanted, have = int(match[1] or 1), cuda_devices()
        if have >= wanted:
            return None
        return f"{wanted} CUDA devices are needed and {have} is here" if wanted > 1 else "no CUDA device here"
    if need == "compiler":
        found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
        if not found:
            return "no C++ compiler here (Debian: apt-get install g++)"
        headers = Path(sysconfig.get_path("include"), "Python.h")  # torch.compile's kernels include it
        return None if headers.is_file() else f"{headers} is not here (Debian: apt-get install python3-dev)"
    with contextlib.suppress(ModuleNotFoundError):  # of the package around a submodule
        if importlib.util.find_spec(need):
            return None
    return f"the package {need} is not installed here"


@functools.cache
def cpu_name() -> str:
    """The processor's own name, as the system tells it."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


@functools.cache
def facts() -> dict:
    """The fingerprint that goes with every result: hardware and versions, no host or user name, no path."""
    import numpy
    import torch

    boards = gpus()
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": [g["name"] for g in boards],
        "gpu_bytes": boards[0]["bytes"] if boards else None,
        "driver": boards[0]["driver"] if boards else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if boards else None,
        "numpy": numpy.__version__,
    }


def slug() -> str:
    """A short name for this machine: its first GPU's, else its processor's ("nvidia-h200")."""
    name = re.sub(r"\((?:R|TM)\)|@.*", "", facts()["gpus"][0] if gpus() else facts()["cpu"])
    return "-".join(re.findall(r"[a-z0-9]+", name.lower())) or "unknown"


def processor(facts: dict) -> str:
    """What a result was computed on, from its facts: the first GPU's name, without one the CPU's."""
    return (facts.get("gpus") or [facts.get("cpu", "unknown")])[0]


def named(facts: dict) -> str:
    """One phrase for the machine of a result: "NVIDIA H200 (driver ...), 16 cores, torch 2.11.0"."""
    board = facts["cpu"]
    if facts["gpus"]:
        count = f"{len(facts['gpus'])} x " if len(facts["gpus"]) > 1 else ""
        board = f"{count}{facts['gpus'][0]} (driver {facts['driver']})"
    return f"{board}, {facts['cores']} cores, torch {facts['torch']}"


def describe() -> str:
    """The facts of this machine as lines of text, and what of the course it can run."""
    from .units import quantity

    f = facts()
    lines = [
        f"processor   {f['cpu']}, {f['cores']} of {os.cpu_count()} cores usable",
        f"memory      {quantity(ram_bytes(), 'bytes')} free of {quantity(f['ram_bytes'], 'bytes')}",
        f"/dev/shm    {quantity(shm_bytes(), 'bytes')} free",
        f"GPU         {', '.join(f['gpus']) or 'none that NVML knows'}",
        f"software    Python {f['python']}, torch {f['torch']}, {f['system']}",
    ]
    for need in ("cuda", "2 cuda", "compiler", "torchvision"):
        lines.append(f"{need:11} {missing(need) or 'yes'}")
    if sys.platform not in ("linux", "darwin"):
        lines.append(f"{sys.platform} is not supported: use Linux, WSL2 or macOS")
    return "\n".join(lines)
