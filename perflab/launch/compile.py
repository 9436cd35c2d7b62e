"""torch.compile with a compile cache of its own: what it generates, what it costs, where it stops, how often anew.

Each function compiles anew, whatever was compiled before, touches neither the learner's cache nor what else
is compiled in this process, and leaves no process and no file. Nothing here is timed but the compiling.
"""

import contextlib
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import psutil
import torch
from torch.utils._pytree import tree_map

from perflab.bench import machine, timing
from perflab.errors import PerflabError

from .breaks import Break, CountingBackend, Recompiles, breaks, forget_sizes, fresh_code, recompiles, silenced
from .dispatch import check_callable

__all__ = ["Break", "Compiled", "Recompiles", "break_even", "breaks", "compiled", "recompiles"]


@dataclass(frozen=True)
class Compiled:
    """`call` is compiled and warm; `kernels` are those the compiler wrote, library calls (matmul) not counted."""

    call: Callable
    compile_s: float
    start_s: float  # that starting the compiler took before, once in a process
    kernels: int
    graphs: int
    breaks: tuple[Break, ...]


def compiled(call: Callable, *inputs, mode: str | None = None) -> Compiled:
    """Compile `call` for these inputs, anew and in a cache of its own, and run it until it is warm.

    compile_s: seconds of the calls until it is warm, when the compiler has been started. Kernels are compiled
    one after the other, and on CPU from bare headers, while torch.compile itself starts processes and keeps
    compiled headers on disk, which pays where there is much to compile.
    mode: as of torch.compile; where it uses CUDA graphs, `call` returns clones of what they hold. A later
    call with other sizes compiles into a cache of its own as well.
    Raises PerflabError where a compiler is missing, and the error of the call itself as it is.

    >>> print(compiled(model, images))  # doctest: +SKIP
    """
    check_callable(call)
    settings = _settings(mode)
    device = next((x.device.type for x in inputs if torch.is_tensor(x)), machine.device())
    if why := _missing(device):
        raise PerflabError(f"torch.compile cannot compile this: {why}.")
    start_s = _started(device)
    result = _compile(call, inputs, settings)
    if settings.get("triton.cudagraphs") and device == "cuda":
        result = replace(result, call=_cloning(result.call))
    return replace(result, start_s=start_s)


def break_even(compile_s: float, before_s: float, after_s: float) -> float:
    """How many calls it takes until compiling has paid; infinite where a call gains nothing."""
    calls = compile_s / (before_s - after_s) if before_s > after_s else math.inf
    return math.ceil(calls) if math.isfinite(calls) else calls


def _settings(mode: str | None) -> dict[str, object]:
    """What a mode of torch.compile changes of the compiler's settings."""
    from torch._inductor import list_mode_options

    known = {None: {}, **list_mode_options()}
    if mode not in known:
        raise PerflabError(f"mode={mode!r} is unknown to torch.compile: use one of {', '.join(list(known)[1:])}.")
    return known[mode]


def _missing(device: str) -> str:
    """What the compiler needs for this device and is not here, or ""."""
    if device == "cpu":
        return machine.missing("compiler") or ""
    if why := machine.missing("triton"):
        return why
    found = any(shutil.which(compiler) for compiler in (os.environ.get("CC", "gcc"), "clang", "cc"))
    return "" if found else "no C compiler here (Debian: apt-get install gcc)"


def _cloning(ready: Callable) -> Callable:
    """The next replay overwrites what this one returned, and torch raises for who still reads it: so clone."""

    def call(*inputs):
        return tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, ready(*inputs))

    return call


_started_devices: set[str] = set()
# In place of torch's own trial kernel, which takes five seconds to compile for the sake of the headers that it
# includes: the options of the compiler are tried all the same, and each kernel includes the headers anyway.
_EMPTY_KERNEL = 'extern "C" void __avx_chk_kernel() {}'


def _started(device: str) -> float:
    """Seconds that it takes to start the compiler for this device, once in a process."""
    if device in _started_devices:
        return 0.0
    began = time.perf_counter()
    if device == "cpu":
        _find_instructions()
    else:
        _compile(torch.neg, [torch.ones(8, device=device)], {})
    _started_devices.add(device)
    return time.perf_counter() - began


def _find_instructions():
    """Import the compiler, and let it try which vector instructions the processor has."""
    folder = _folder()
    try:
        with silenced(), _own_cache(folder), _failure_in_a_line():
            from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401

            with mock.patch.object(cpu_vec_isa.VecISA, "_avx_code", _EMPTY_KERNEL, create=True):
                cpu_vec_isa.pick_vec_isa()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(call: Callable, inputs, settings: dict) -> Compiled:
    """Compile and run until it is warm; the compiler has been started."""
    folder = _folder()

    def compiler(graph, examples):
        from torch._inductor.compile_fx import compile_fx

        with _own_cache(folder):  # here too: another size is compiled later
            return compile_fx(graph, examples, config_patches=settings)

    backend = CountingBackend(compiler)
    weakref.finalize(backend, shutil.rmtree, folder, ignore_errors=True)  # what later compilations leave
    with silenced() as found:
        from torch._inductor import metrics

        ready = torch.compile(fresh_code(call), backend=backend)
        forget_sizes()
        before = metrics.generated_kernel_count
        try:
            with _own_cache(folder), _failure_in_a_line():
                compile_s = _warm(ready, inputs, 3 if settings.get("triton.cudagraphs") else 1)
                kernels = metrics.generated_kernel_count - before
                _warm(ready, inputs, 2)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return Compiled(ready, compile_s, 0.0, kernels, backend.graphs, tuple(found))


def _warm(ready: Callable, inputs, calls: int) -> float:
    timing.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        ready(*inputs)
    timing.synchronize()
    return time.perf_counter() - began


def _folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="perflab-compile-")
    except OSError as e:
        said = f"torch.compile needs a folder for its files ({e.strerror or e}): set TMPDIR to one with room."
        raise PerflabError(said) from None


@contextlib.contextmanager
def _own_cache(folder: str) -> Iterator[None]:
    """Compile into `folder`, in this process, whatever lies in other caches; no compiler outlives an interrupt."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    os.makedirs(folder, exist_ok=True)
    changed = {"compile_threads": 1}
    if hasattr(config, "cpp_cache_precompile_headers"):  # 150 MB that would stay outside of `folder`
        changed["cpp_cache_precompile_headers"] = False
    temporary = mock.patch.dict(os.environ, TMPDIR=folder)  # of the compilers: one that is ended leaves its files there
    try:
        with temporary, config.patch(changed), fresh_cache(dir=folder, delete=False):
            yield
    except BaseException:
        _end_compilers(folder)
        raise


def _end_compilers(folder: str):
    """End the compilers (g++, ptxas) that work in `folder`, and what they started."""
    while running := [p for p in psutil.process_iter() if _works_in(p, folder)]:
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=1)


def _works_in(process: psutil.Process, folder: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid != os.getpid() and process.environ().get("TMPDIR") == folder
    return False


@contextlib.contextmanager
def _failure_in_a_line() -> Iterator[None]:
    """What a compiler that fails prints, pages of it, in the one line that tells."""
    try:
        yield
    except Exception as e:
        if not type(e).__module__.startswith("torch._inductor"):
            raise
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        told = next((line for line in lines if "error:" in line), lines[0])
        raise PerflabError(f"The compiler failed ({told[:200]}): mend it, or go on without torch.compile.") from None
