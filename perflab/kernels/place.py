"""Where in the caller's own code something happened: neither in torch, nor in a library, nor in this room's tools."""

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_TOOLS = tuple(os.path.join(os.path.dirname(__file__), f"{name}.py") for name in ("capturable", "graphs", "fusion"))
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Place:
    """A line of the caller's own code. `str()` gives "train.py, line 27", or "cell, line 5" in a notebook."""

    file: str
    line: int

    @classmethod
    def of(cls, path: str, line: int) -> "Place":
        cell = "ipykernel" in path or "ipython-input" in path or path.startswith("<")
        return cls("cell" if cell else os.path.basename(path), line)

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.line else "place unknown"


def own_place(frames: Sequence[tuple[str, int]]) -> Place:
    """The innermost of (path, line) frames, outermost first, that is not torch's, a library's or one of these tools."""
    for path, line in reversed(frames):
        generated = path.startswith(("<frozen", "<eval_with_key>", "<__"))
        if not generated and path not in _TOOLS and not path.startswith((_TORCH, *_LIBRARIES)):
            return Place.of(path, line)
    return Place("", 0)


def stack(frame) -> list[tuple[str, int]]:
    """(path, line) of a frame and all that called it, outermost first."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]
