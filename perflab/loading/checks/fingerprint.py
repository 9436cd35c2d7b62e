"""What a sample is, in a few bytes: so that samples of different processes can be compared in their thousands.

DataLoader workers import this file: torch and numpy may enter, nothing that draws or teaches.
"""

import contextlib
import functools
import hashlib
import random
import struct
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
    made = hashlib.blake2b(digest_size=8)
    _feed(made.update, sample, 0)
    return int.from_bytes(made.digest(), "little")


def _feed(put, x, depth: int):
    if isinstance(x, torch.Tensor):
        put(_head(x.dtype, x.shape))
        _feed_tensor(put, x)
    elif isinstance(x, np.ndarray):
        put(f"A{x.dtype}{x.shape}".encode())
        if x.dtype.hasobject:
            _feed(put, x.tolist(), depth + 1)
        else:
            put(np.ascontiguousarray(x).tobytes())
    elif isinstance(x, str):
        put(b"S" + x.encode("utf8", "surrogatepass") + b"\0")
    elif type(x) is float:
        put(b"F" + struct.pack("<d", x))
    elif isinstance(x, (*PLAIN, np.generic)):
        put(f"{type(x).__name__}{x!r}\0".encode())
    elif depth > DEEPEST:  # a structure that contains itself
        put(b"...")
    elif isinstance(x, Mapping):
        put(f"D{len(x)}".encode())
        for key, value in x.items():
            _feed(put, key, depth + 1)
            _feed(put, value, depth + 1)
    elif isinstance(x, list | tuple):
        put(f"L{type(x).__name__}{len(x)}".encode())
        kinds = set(map(type, x)) if len(x) > LISTED else ()
        if kinds == {float}:
            put(struct.pack(f"<{len(x)}d", *x))
        elif kinds == {int}:
            put(repr(x).encode())
        else:
            for member in x:
                _feed(put, member, depth + 1)
    elif isinstance(x, Set):
        put(f"E{sorted(digest(member) for member in x)}".encode())
    else:
        put(f"O{type(x).__qualname__}".encode())
        _feed_object(put, x, depth)


@functools.lru_cache(maxsize=256)
def _head(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"T{dtype}{tuple(shape)}".encode()


def _feed_tensor(put, x: torch.Tensor):
    with contextlib.suppress(TypeError, RuntimeError):  # what numpy cannot show takes the longer way
        put((x.detach() if x.requires_grad else x).numpy().tobytes())
        return
    if x.device.type != "cpu":
        return
    x = x.detach()
    if x.layout is not torch.strided or x.is_quantized:
        x = x.to_dense() if x.layout is not torch.strided else x.dequantize()
    x = x.resolve_conj().resolve_neg().contiguous()
    put(x.reshape(-1).view(torch.uint8).numpy().tobytes())


def _feed_object(put, x, depth: int):
    if callable(getattr(x, "tobytes", None)):  # a picture of PIL, an array.array, a memoryview
        put(f"{getattr(x, 'mode', '')}{getattr(x, 'size', '')}".encode() + x.tobytes())
        return
    kept = dict(getattr(x, "__dict__", {}))
    for klass in type(x).__mro__:
        for name in klass.__dict__.get("__slots__", ()):
            if isinstance(name, str) and hasattr(x, name):
                kept[name] = getattr(x, name)
    _feed(put, {k: v for k, v in kept.items() if not callable(v)}, depth + 1)


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
