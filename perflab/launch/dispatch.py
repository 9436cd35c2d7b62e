"""What it costs to start an operator: the chain that notebook 04 times, the host's share, who chooses the kernel.

Nothing here touches a device on import; nothing draws or teaches.
"""

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perflab.bench import machine, timing
from perflab.bench.timing import Samples, samples
from perflab.errors import PerflabError

# Words in a kernel's name that tell whose it is. The first match counts: the kernels of cuDNN and cuBLAS are often
# built with CUTLASS and carry both names.
_FAMILIES = {
    "PyTorch": ("at::native", "at_cuda_detail", "softmax_warp", "pytorch_flash", "fmha_cutlass"),
    "Triton": ("triton_",),
    "cuDNN": ("cudnn", "implicit_gemm", "implicit_convolve", "fprop", "winograd", "nchwtonhwc", "nhwctonchw"),
    "cuBLAS": ("cublas", "nvjet", "gemm", "gemv", "splitk", "cutlass", "dot_kernel"),
}
_SUBMITS = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch")


def check_callable(call):
    """Raises PerflabError where `call` is nothing that can be called, such as what a step has returned."""
    if not callable(call):
        raise PerflabError(
            f"A function or a model to call is needed, and this is of type {type(call).__name__}: "
            "write lambda: step(batch) for a step."
        )


def chain(
    ops: int, n: int, device: str | torch.device = "cpu"
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A chain of `ops` elementwise operators, add, relu, mul and again, over `n` float32 elements; its inputs.

    `call(x, y)` returns a tensor (n,). Each operator needs the one before it. y lies between 0.25 and 0.75,
    so that the values stay near 1 however long the chain is.
    """
    steps = (operator.add, lambda x, y: torch.relu(x), operator.mul)

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for k in range(ops):
            x = steps[k % 3](x, y)
        return x

    generator = torch.Generator().manual_seed(n)
    x, y = (torch.rand(n, generator=generator) for _ in range(2))
    return call, (x.to(device), (0.25 + y / 2).to(device))


# -- the host's share


def issued(call: Callable[[], object]) -> Samples:
    """`host_s`: seconds until `call` has handed over its work, the device not waited for.

    The device is idle when it begins, so that no full queue holds the host. On a CPU the operator computes
    before it returns, and the figure is that of the whole call.
    """
    timing.synchronize()
    began = time.perf_counter()
    call()
    return samples(host_s=time.perf_counter() - began)


def worked(call: Callable[[], object], times: int = 3) -> Samples:
    """`wall_s`: seconds of single calls, the device waited for; `host_s`: of the host alone, as `issued` has it;
    `busy_s`: seconds in which the device worked during one more call.

    Two clocks: the first two are the host's, without a profiler, which would slow it; the third is the union of
    the intervals of kernels, which a profiler does not slow.
    """
    walls = timing.wall(call, blocks=times)[0]
    hosts = [issued(call)["host_s"] for _ in range(times)]
    return samples(wall_s=walls, host_s=hosts, busy_s=timing.busy(call))


# -- who chooses


class _Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatched(call: Callable[[], object]) -> list[str]:
    """The operators that the dispatcher hands to a backend during one call, in order: ["aten.mm.default"].

    Slow: count with it, never time in it. Code that torch.compile made is not looked into.
    """
    check_callable(call)
    with _Dispatched() as mode:
        call()
    return mode.names


def keys(x: torch.Tensor) -> str:
    """The dispatch keys of a tensor, by which an operator's code is chosen: "CPU, ADInplaceOrView, ..."."""
    text = str(torch._C._dispatch_keys(x))
    return text.removeprefix("DispatchKeySet(").removesuffix(")")


def kernels(call: Callable[[], object]) -> list[str]:
    """The names of the CUDA kernels of one call, in the order in which they ran. Needs CUDA."""
    return [e.name for e in _events(call) if _on_device(e) and not _moves_memory(e.name)]


@dataclass(frozen=True)
class Submitted:
    """What one call gave to the driver, and what the device then ran."""

    submissions: int
    kernels: int


def submitted(call: Callable[[], object]) -> Submitted:
    """How often one call submits work to the driver, and how many kernels that starts. Needs CUDA.

    The most of three looks: the profiler may lose the first events of a process, and never invents any.
    """
    most = Submitted(0, 0)
    for _ in range(3):
        events = _events(call)
        submissions = sum(not _on_device(e) and any(word in e.name for word in _SUBMITS) for e in events)
        ran = sum(_on_device(e) and not _moves_memory(e.name) for e in events)
        most = Submitted(max(most.submissions, submissions), max(most.kernels, ran))
    return most


def family(kernel: str) -> str:
    """Whose kernel this is, by its name: "cuBLAS", "cuDNN", "PyTorch", "Triton" or "unknown"."""
    name = kernel.lower()
    return next((whose for whose, words in _FAMILIES.items() if any(word in name for word in words)), "unknown")


def _events(call: Callable[[], object]) -> list:
    check_callable(call)
    if why := machine.missing("cuda"):
        raise PerflabError(f"Kernels are looked for on a CUDA device: {why}.")
    call()  # libraries load, and choose, in the first call
    timing.synchronize()
    with timing.profiler() as profile:
        call()
        timing.synchronize()
    return sorted(profile.events(), key=lambda e: e.time_range.start)


def _on_device(event) -> bool:
    on = event.device_type == torch.autograd.DeviceType.CUDA
    return on and not getattr(event, "is_user_annotation", False)


def _moves_memory(name: str) -> bool:
    return name.lower().startswith(("memcpy", "memset"))
