"""What a dataset carries with it into a worker: everything that its attributes, closures and globals lead to.

DataLoader workers import this file: torch and numpy may enter, nothing that draws or teaches.
"""

import contextlib
import ctypes
import itertools
import logging
import multiprocessing.process
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch

from .digest import attributes, generator_state

MOST = 20_000  # objects looked at
SMALL_BYTES = 2**20
FEW = 48  # members looked at in a long container
LEAVES = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, torch.Size, torch.dtype),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    *(logging.Logger, logging.Handler, threading.Thread, multiprocessing.process.BaseProcess),
)
# Their code holds nothing of the learner's: not read for globals.
LIBRARIES = {"torch", "numpy", "PIL", "builtins", "pandas", "perflab", *sys.stdlib_module_names}
LIBRARIES.discard("__main__")


def reach(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(path, object) of all that `roots` lead to, nearest first: "StagedPhotos.transform.steps[2]"."""
    waiting, seen = deque(roots.items()), {}
    while waiting and len(seen) < MOST:
        path, x = waiting.popleft()
        if isinstance(x, LEAVES) or id(x) in seen or (isinstance(x, np.ndarray) and x.dtype != object):
            continue
        seen[id(x)] = x  # kept, so that no other object gets its id
        yield path, x
        with contextlib.suppress(Exception):  # a mapping that cannot be gone through, a view of what is closed
            waiting.extend(inside(path, x))


def inside(path: str, x) -> Iterator[tuple[str, object]]:
    if isinstance(x, torch.Tensor):
        return
    if isinstance(x, type):
        yield from _of_class(path, x)
    elif isinstance(x, Mapping):
        for key, value in list(_members(x.items())):
            yield f"{path}[{key!r:.40}]", value
    elif isinstance(x, list | tuple | set | frozenset | deque | np.ndarray):
        for i, value in enumerate(_members(x)):
            yield f"{path}[{i}]", value
    elif isinstance(x, types.FunctionType):
        yield from _of_function(path, x)
    elif isinstance(x, types.MethodType):
        yield from ((path, x.__self__), (path, x.__func__))
    elif isinstance(x, partial):
        yield from ((path, x.func), (f"{path}.args", x.args), (f"{path}.keywords", x.keywords))
    elif isinstance(x, types.GeneratorType):
        if x.gi_frame is not None:
            yield from ((f"{path}.{name}", value) for name, value in x.gi_frame.f_locals.items())
        yield path, x.gi_yieldfrom
    else:
        yield from ((f"{path}.{name}", value) for name, value in attributes(x).items())
        yield type(x).__name__, type(x)


def _members(x) -> Iterator:
    """The first members of a container, and the last ones where that costs nothing."""
    if isinstance(x, list | tuple | np.ndarray) and len(x) > FEW:
        return itertools.chain(x[: FEW - 2], x[-2:])
    return itertools.islice(x, FEW)


def _of_class(path: str, klass: type) -> Iterator[tuple[str, object]]:
    """What a class of the learner's keeps, and what its methods use."""
    for base in klass.__mro__:
        if base.__module__.partition(".")[0] not in LIBRARIES:
            for name, value in list(vars(base).items()):
                inner = getattr(value, "__func__", value)  # of a static or a class method
                if isinstance(inner, types.FunctionType):
                    yield path, inner
                elif not name.startswith("__"):
                    yield f"{base.__name__}.{name}", inner


def _of_function(path: str, f: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Closure, defaults, and the globals that it names, functions of the same module included."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield f"{path}.{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((f"{path} default {i}", value) for i, value in enumerate(f.__defaults__ or ()))
    if hasattr(f, "__wrapped__"):
        yield path, f.__wrapped__
    if (f.__module__ or "").partition(".")[0] in LIBRARIES:
        return
    for name in f.__code__.co_names:
        value = f.__globals__.get(name)
        if isinstance(value, type | types.FunctionType) and value.__module__ != f.__module__:
            continue
        yield name, value


def generators(roots: Mapping[str, object]) -> dict[str, int]:
    """The random generators that a dataset carries, and where each stands: {"A.g": state}."""
    found = {}
    for path, x in reach(roots):
        if (state := generator_state(x)) is not None:
            found.setdefault(path, state)
    return found


def lengths(roots: Mapping[str, object]) -> dict[str, int]:
    """How long each container is that could grow."""
    return {
        path: len(x)
        for path, x in reach(roots)
        if isinstance(x, list | dict | set | bytearray) or (isinstance(x, deque) and x.maxlen is None)
    }


def shared(roots: Mapping[str, object]) -> list[tuple[object, bytes]]:
    """Small memory that a forked copy shares with this process, and what it holds: tensors, ctypes, SharedMemory."""
    found = []
    for _, x in reach(roots):
        with contextlib.suppress(Exception):  # a view that cannot be taken, or was closed
            view = _view(x)
            if view is not None and view.nbytes <= SMALL_BYTES:
                found.append((x, bytes(view)))
    return found


def put_back(held: list[tuple[object, bytes]]):
    """Make shared memory hold again what it held."""
    for x, content in held:
        with contextlib.suppress(Exception):
            if bytes(_view(x)) != content:
                _view(x)[:] = content


def _view(x) -> memoryview | None:
    if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.is_shared():
        return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy())
    if isinstance(x, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return memoryview(x).cast("B")
    return x.buf if isinstance(x, SharedMemory) else None


def open_files(roots: Mapping[str, object]) -> Iterator[tuple[str, object, int]]:
    """(path, object, descriptor) of what is open: files, sockets, and what else has a fileno()."""
    for path, x in reach(roots):
        if isinstance(x, type) or not callable(getattr(type(x), "fileno", None)):
            continue
        try:
            fd = x.fileno()
        except Exception:  # closed, or without one
            continue
        if isinstance(fd, int) and fd > 2:
            yield path, x, fd


def long_containers(roots: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Long containers of Python objects: {path: (objects, bytes)}, estimated from a few hundred of each."""
    found: dict[str, tuple[int, int]] = {}
    for path, x in reach(roots):
        if any(path.startswith(f"{outer}[") for outer in found):
            continue
        for name, pile in _columns(path, x):
            if len(pile) >= 1000 and (weight := _weight(pile))[0]:
                found[name] = weight
    return found


def _columns(path: str, x) -> Iterator[tuple[str, object]]:
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(x, pandas.DataFrame):
        yield from ((f"{path}[{c!r}]", x[c].to_numpy()) for c in x.columns if x[c].dtype == object)
    elif pandas is not None and isinstance(x, pandas.Series) and x.dtype == object:
        yield path, x.to_numpy()
    elif isinstance(x, list | tuple | dict | set | frozenset) or (isinstance(x, np.ndarray) and x.dtype == object):
        yield path, x


def _weight(pile) -> tuple[int, int]:
    """Objects and bytes of a container, from 200 of its members; shared members count once."""
    n = len(pile)
    if isinstance(pile, list | tuple | np.ndarray):
        sample = [pile[i] for i in range(0, n, max(1, n // 200))]
    else:
        sample = list(itertools.islice(pile.items() if isinstance(pile, dict) else pile, 200))
    objects = [part for member in sample for part in _parts(member)]
    if isinstance(pile, dict):  # the tuple of key and value was made here and now
        objects = [x for x in objects if not any(x is pair for pair in sample)]
    own = {id(x): sys.getsizeof(x) for x in objects if not (type(x) is int and -5 <= x <= 256)}
    if len(own) <= 1:
        return 0, 0
    return round(len(own) * n / len(sample)), round(sum(own.values()) * n / len(sample))


def _parts(x) -> list:
    """An object and what it holds directly, no classes and functions."""
    held = [*x.keys(), *x.values()] if isinstance(x, dict) else x if isinstance(x, list | tuple | set) else ()
    held = held or attributes(x).values() if hasattr(x, "__dict__") else held
    return [y for y in (x, *itertools.islice(held, FEW)) if not isinstance(y, type | types.FunctionType | bool | None)]
