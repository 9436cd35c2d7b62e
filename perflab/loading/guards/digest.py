"""What a sample is, in a few bytes: so that samples of different processes can be compared in their thousands.

DataLoader workers import this file: torch and numpy may enter, nothing that draws or teaches.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Set

import numpy as np
import torch

PLAIN = (bool, int, float, complex, bytes, bytearray, type(None))
SOURCES = ("random", "numpy.random", "torch")
DEEPEST = 12
LISTED = 8  # members of a list that its form names


def digest(sample) -> int:
    """64 bits of a sample's content: values, types, shapes, nesting and order. Equal content, equal digest.

    Tensors on another device than the CPU count by type and shape; objects by their attributes.
    """
    content = hashlib.blake2b(digest_size=8)
    _feed(content.update, sample, 0)
    return int.from_bytes(content.digest(), "little")


def _feed(put, x, depth: int):
    if isinstance(x, torch.Tensor):
        put(f"T{x.dtype}{tuple(x.shape)}".encode())
        if x.device.type == "cpu":
            x = x.detach().to_dense() if x.layout is not torch.strided else x.detach().resolve_conj().resolve_neg()
            put(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(x, np.ndarray):
        put(f"A{x.dtype}{x.shape}".encode())
        if x.dtype.hasobject:
            _feed(put, x.tolist(), depth + 1)
        else:
            put(np.ascontiguousarray(x).tobytes())
    elif isinstance(x, (str, *PLAIN, np.generic)):
        put(f"{type(x).__name__}{x!r}\0".encode("utf8", "surrogatepass"))
    elif depth > DEEPEST:  # a structure that contains itself
        put(b"...")
    elif isinstance(x, Mapping):
        put(f"D{len(x)}".encode())
        for pair in x.items():
            _feed(put, pair, depth + 1)
    elif isinstance(x, list | tuple):
        put(f"L{type(x).__name__}{len(x)}".encode())
        for member in x:
            _feed(put, member, depth + 1)
    elif isinstance(x, Set):
        put(f"E{sorted(digest(member) for member in x)}".encode())
    elif callable(getattr(x, "tobytes", None)):  # a picture of PIL, an array.array, a memoryview
        put(f"O{type(x).__qualname__}{getattr(x, 'mode', '')}{getattr(x, 'size', '')}".encode() + x.tobytes())
    else:
        put(f"O{type(x).__qualname__}".encode())
        _feed(put, {name: y for name, y in attributes(x).items() if not callable(y)}, depth + 1)


def attributes(x) -> dict[str, object]:
    """What an object holds by name, in its __dict__ and in __slots__."""
    slots = (name for klass in type(x).__mro__ for name in klass.__dict__.get("__slots__", ()))
    held = {name: getattr(x, name) for name in slots if isinstance(name, str) and hasattr(x, name)}
    return held | (dict(vars(x)) if isinstance(getattr(x, "__dict__", None), dict) else {})


def form(sample, depth: int = 0) -> str:
    """Types, dtypes and shapes of a sample, as words: what random values leave comparable."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return f"{type(sample).__name__} {sample.dtype} {tuple(sample.shape)}"
    if isinstance(sample, Mapping) and depth < DEEPEST:
        return "{" + ", ".join(f"{k}: {form(v, depth + 1)}" for k, v in sample.items()) + "}"
    if isinstance(sample, list | tuple) and depth < DEEPEST:
        more = f" and {len(sample) - LISTED} more" if len(sample) > LISTED else ""
        return "(" + ", ".join(form(member, depth + 1) for member in sample[:LISTED]) + more + ")"
    return type(sample).__name__


def tensors(sample, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor of a sample or a batch, in containers and attributes too."""
    if isinstance(sample, torch.Tensor):
        yield sample
    elif depth > DEEPEST or isinstance(sample, (str, *PLAIN, np.ndarray, np.generic)):
        return
    elif isinstance(sample, Mapping):
        for member in sample.values():
            yield from tensors(member, depth + 1)
    elif isinstance(sample, list | tuple | Set):
        for member in sample:
            yield from tensors(member, depth + 1)
    elif hasattr(sample, "__dict__"):
        yield from tensors(vars(sample), depth + 1)


def devices(sample) -> set[str]:
    """The kinds of device that the tensors of a sample live on, the CPU left out."""
    return {x.device.type for x in tensors(sample)} - {"cpu"}


def seed(number: int, sources=SOURCES):
    """Start the global random streams `sources` from one number, so that a sample can be made twice alike.

    The CPU's generator alone: torch.manual_seed also queues a seed for every CUDA device, a hundred times slower.
    """
    if "random" in sources:
        random.seed(number)
    if "numpy.random" in sources:
        np.random.seed(number & 0xFFFFFFFF)
    if "torch" in sources:
        torch.default_generator.manual_seed(number)


def global_states() -> dict[str, int]:
    """Where each global random stream of this process stands."""
    return {
        "random": hash(random.getstate()[1]),
        "numpy.random": digest(np.random.get_state()),
        "torch": digest(torch.default_generator.get_state()),
    }


def generator_state(x) -> int | None:
    """Where a random generator stands: numpy's, random.Random, torch's. None for what is no generator of its own."""
    if isinstance(x, np.random.Generator):
        return digest(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return None if x is np.random.mtrand._rand else digest(x.get_state())
    if isinstance(x, random.Random) and x is not random._inst:
        with contextlib.suppress(NotImplementedError):  # SystemRandom asks the system each time
            return hash(x.getstate()[1])
    if isinstance(x, torch.Generator) and x is not torch.default_generator and x.device.type == "cpu":
        return digest(x.get_state())
    return None
