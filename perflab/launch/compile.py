"""torch.compile with a compile cache of its own: what it generates, what it costs, where it stops, how often anew.

Each function compiles anew, whatever was compiled before, touches neither the learner's cache nor what else
is compiled in this process, and leaves no process and no file. Nothing here is timed but the compiling.
"""

import contextlib
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch
from torch.utils._pytree import tree_map

from perflab.bench import cleanup, machine, timing
from perflab.errors import PerflabError

from .breaks import Break, NotingBackend, Recompiles, anew, breaks, forget_sizes, quiet, recompiles
from .dispatch import check_callable

__all__ = ["Break", "Compiled", "Recompiles", "break_even", "breaks", "compiled", "modes", "options", "recompiles"]


@dataclass(frozen=True)
class Compiled:
    """`call` is compiled and warm; `kernels` are those the compiler wrote, library calls (matmul) not counted."""

    call: Callable
    compile_s: float
    start_s: float  # that starting the compiler took before, once in a process
    kernels: int
    graphs: int
    breaks: tuple[Break, ...]
    cuda_graphs: bool


@contextlib.contextmanager
def _no_compiler_left() -> Iterator[None]:
    """An interrupt or an error ends the compilers (g++, ptxas) that run, and those they started."""
    before = cleanup.descendants()

    def end():
        running = []
        for key, p in cleanup.descendants().items():
            with contextlib.suppress(psutil.Error):
                if key not in before and "python" not in p.name():
                    p.terminate()  # so that it deletes what it has half written
                    running.append(p)
        for p in psutil.wait_procs(running, timeout=1)[1]:
            with contextlib.suppress(psutil.Error):
                p.kill()

    previous = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and callable(previous)

    def received(number, frame):
        end()
        previous(number, frame)

    if mine:
        signal.signal(signal.SIGINT, received)
    try:
        yield
    except BaseException:
        end()
        raise
    finally:
        if mine and signal.getsignal(signal.SIGINT) is received:
            signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _own_cache(folder: str) -> Iterator[None]:
    """Compile into `folder`, in this process, whatever lies in other caches."""
    from torch._inductor import config
    from torch._inductor import utils as inductor

    os.makedirs(folder, exist_ok=True)
    changed = {"compile_threads": 1}
    if hasattr(config, "cpp_cache_precompile_headers"):  # 150 MB that would stay outside of `folder`
        changed["cpp_cache_precompile_headers"] = False
    cache = getattr(inductor, "fresh_cache", None) or inductor.fresh_inductor_cache
    temporary = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder  # of the compilers: one that is ended leaves its files there
    try:
        with _no_compiler_left(), config.patch(changed), cache(dir=folder, delete=False):
            yield
    finally:
        if temporary is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = temporary


def _lacks(inputs) -> str:
    """What the compiler needs for these tensors and is not here, or ""."""
    if not any(torch.is_tensor(x) and x.is_cuda for x in inputs):
        return machine.missing("compiler") or ""
    if why := machine.missing("triton"):
        return why
    found = any(shutil.which(c) for c in (os.environ.get("CC", "gcc"), "clang", "cc"))
    return "" if found else "no C compiler here (Debian: apt-get install gcc)"


def options(mode: str | None = None) -> dict[str, object]:
    """What a mode of torch.compile changes of the compiler's settings. Raises PerflabError for an unknown one."""
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode is not None and mode not in list(known):
        raise PerflabError(f"mode={mode!r} is unknown to torch.compile: use one of {', '.join(known)}.")
    return dict(known[mode]) if mode else {}


def modes() -> dict[str, dict[str, str]]:
    """Rows for `observe`: the modes of torch.compile, and which of them use CUDA graphs or try kernels out."""
    from torch._inductor import list_mode_options

    return {
        name: {
            "cuda_graphs": "yes" if changed.get("triton.cudagraphs") else "no",
            "tries_kernels_out": "yes" if changed.get("max_autotune") else "no",
        }
        for name, changed in list_mode_options().items()
    }


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
    changed = options(mode)
    device = next((x.device.type for x in inputs if torch.is_tensor(x)), machine.device())
    start_s = _started(device)
    ready, compile_s, kernels, seen = _compile(call, inputs, changed)
    graphs = bool(changed.get("triton.cudagraphs")) and device == "cuda"
    if graphs:
        ready = _kept(ready)
    return Compiled(ready, compile_s, start_s, kernels, seen.graphs, tuple(seen.breaks), graphs)


def _kept(ready: Callable) -> Callable:
    """The next replay overwrites what this one returned, and torch raises for who still reads it: so clone."""

    def call(*inputs):
        return tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, ready(*inputs))

    return call


_on: set[str] = set()


def _started(device: str) -> float:
    """Seconds that it takes to start the compiler for this device, once in a process."""
    if device in _on:
        return 0.0
    began = time.perf_counter()
    if device == "cpu":
        if why := machine.missing("compiler"):
            raise PerflabError(f"torch.compile cannot compile this: {why}.")
        _find_instructions()
    else:
        _compile(torch.neg, [torch.ones(8, device=device)], {})
    _on.add(device)
    return time.perf_counter() - began


def _folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="perflab-compile-")
    except OSError as e:
        said = f"torch.compile needs a folder for its files ({e.strerror or e}): set TMPDIR to one with room."
        raise PerflabError(said) from None


@contextlib.contextmanager
def _shortly() -> Iterator[None]:
    """What a compiler that fails prints, pages of it, in the one line that tells."""
    try:
        yield
    except Exception as e:
        if not type(e).__module__.startswith("torch._inductor"):
            raise
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        told = next((line for line in lines if "error:" in line), lines[0])
        raise PerflabError(f"The compiler failed ({told[:200]}): mend it, or go on without torch.compile.") from None


def _find_instructions():
    """Import the compiler, and let it try which vector instructions the processor has."""
    folder = _folder()
    try:
        with quiet(NotingBackend(None)), _own_cache(folder), _shortly():
            from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401

            cpu_vec_isa.pick_vec_isa()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(call: Callable, inputs, changed: dict) -> tuple[Callable, float, int, NotingBackend]:
    """The compiled call, seconds until it was warm, kernels generated, and what was seen."""
    folder = _folder()
    first = True

    def compiler(seen: NotingBackend, graph, examples):
        from torch._inductor.compile_fx import compile_fx

        seen.lacks = _lacks(examples)
        if seen.lacks:
            raise RuntimeError(seen.lacks)
        with contextlib.nullcontext() if first else _own_cache(folder):
            return compile_fx(graph, examples, config_patches=changed)

    seen = NotingBackend(compiler)
    weakref.finalize(seen, shutil.rmtree, folder, ignore_errors=True)  # what later compilations leave
    with quiet(seen):
        from torch._inductor import metrics

        ready = torch.compile(anew(call), backend=seen)
        forget_sizes()
        before = metrics.generated_kernel_count
        try:
            with _own_cache(folder), _shortly():
                compile_s = _warm(ready, inputs, 3 if changed.get("triton.cudagraphs") else 1)
                kernels = metrics.generated_kernel_count - before
                _warm(ready, inputs, 2)
        except Exception:
            if seen.lacks:
                raise PerflabError(f"torch.compile cannot compile this: {seen.lacks}.") from None
            raise
        finally:
            first = False
            shutil.rmtree(folder, ignore_errors=True)
    return ready, compile_s, kernels, seen


def _warm(ready: Callable, inputs, calls: int) -> float:
    timing.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        ready(*inputs)
    timing.synchronize()
    return time.perf_counter() - began


def break_even(compile_s: float, before_s: float, after_s: float) -> float:
    """How many calls it takes until compiling has paid; infinite where a call gains nothing."""
    calls = compile_s / (before_s - after_s) if before_s > after_s else math.inf
    return math.ceil(calls) if math.isfinite(calls) else calls
