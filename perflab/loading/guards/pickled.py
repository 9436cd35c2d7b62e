"""Can what a loader holds travel into a worker that does not inherit it? Tried without starting one."""

import math
import os
import sys
import types
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler

from perflab.errors import first_line

from .walk import inside

DEEPEST = 6


class _Enough(Exception):
    """So much was pickled that the rest is not worth its time."""


class _Nowhere:
    """Takes bytes and forgets them, so that a large dataset is pickled in no memory; `most` of them at most."""

    def __init__(self, most: float):
        self.left = most

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise _Enough


class _Witness(ForkingPickler):
    """Pickles as multiprocessing does, and notes the classes and functions that a new process cannot import."""

    def __init__(self, sink):
        super().__init__(sink)
        self.homeless: list[str] = []

    def reducer_override(self, x):
        if isinstance(x, type | types.FunctionType) and x.__module__ == "__main__" and not _main_has_a_file():
            self.homeless.append(x.__qualname__)
        return NotImplemented


class _Popen:
    """What locks and pipes ask for when they are pickled on the way into a child process."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> int:  # the name that multiprocessing calls
        return fd


def _main_has_a_file() -> bool:
    return os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")


def trouble(x, most_bytes: float = math.inf) -> tuple[str, str]:
    """Why `x` cannot reach a worker that spawn or forkserver starts: ("pickle" or "main", words), empty if it can."""
    witness = _Witness(_Nowhere(most_bytes))
    context.set_spawning_popen(_Popen())
    try:
        witness.dump(x)
    except _Enough:
        pass
    except Exception as fault:
        return "pickle", first_line(fault)
    finally:
        context.set_spawning_popen(None)
    if witness.homeless:
        return "main", witness.homeless[0]
    return "", ""


def culprit(name: str, x, most_bytes: float = math.inf) -> tuple[str, str, str]:
    """(path, "pickle" or "main", words) of the innermost part that cannot travel; empty if all can."""
    kind, words = trouble(x, most_bytes)
    if kind != "pickle":
        return (name if kind else ""), kind, words
    path, inner = name, x
    for _ in range(DEEPEST):
        parts = () if isinstance(inner, type | types.FunctionType) else inside(path, inner)
        wrong = next(((p, y, said) for p, y in parts if (said := trouble(y))[0] == "pickle"), None)
        if wrong is None:
            break
        path, inner, (_, words) = wrong
    return path, kind, f"{_named(inner)} ({words})"


def _named(x) -> str:
    """What a part is, in words."""
    name = getattr(x, "__name__", type(x).__name__)
    if isinstance(x, types.FunctionType):
        return "a lambda" if name == "<lambda>" else f"the function {name}, defined inside another"
    local = isinstance(x, type) or "<locals>" in type(x).__qualname__
    return f"of the class {name}, defined inside a function" if local else f"of type {name}"
