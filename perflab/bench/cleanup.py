"""No process, no worker and no memory left behind when a measurement ends."""

import gc
import sys
import types
from collections.abc import Mapping

import psutil


def end_loader_workers(loader) -> None:
    """End the workers that a DataLoader keeps, or those of its iterator; the loader itself stays usable."""
    iterator = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None
    elif hasattr(loader, "_shutdown_workers"):
        loader._shutdown_workers()


def close(x) -> None:
    """End what a prepared value holds: DataLoader workers, anything with close(), members of containers."""
    if isinstance(x, type | types.ModuleType):
        return
    if isinstance(x, Mapping):
        for member in x.values():
            close(member)
    elif isinstance(x, list | tuple):
        for member in x:
            close(member)
    elif hasattr(x, "_shutdown_workers") or hasattr(x, "_iterator"):
        end_loader_workers(x)
    elif callable(getattr(x, "close", None)):
        x.close()


def release():
    """Let go of what an error or an interrupt still refers to: frames hold iterators and tensors.

    >>> release()
    """
    sys.last_value = sys.last_traceback = sys.last_exc = None
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def descendants() -> dict[tuple[int, float], psutil.Process]:
    """The living descendants of this process, by pid and start time."""
    return {(p.pid, p.create_time()): p for p in psutil.Process().children(recursive=True)}
