"""Which line of whose code: a Place, and whether a file is the learner's own. Reads frames; changes nothing."""

import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

TORCH = str(Path(torch.__file__).parent)
PERFLAB = str(Path(__file__).resolve().parent.parent)
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Place:
    """A line of code. `file` is its path, or "cell" for a cell of a notebook; `code` the line's text where known.

    >>> Place("/home/me/train.py", 27, "loss.item()")
    train.py, line 27
    """

    file: str = ""
    line: int = 0
    code: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return f"{Path(self.file).name}, line {self.line}" if self.line else "a place that no Python frame tells"


def place(file: str, line: int) -> Place:
    """The Place of a frame's file name and line."""
    return Place("cell" if is_cell(file) else file, line, linecache.getline(file, line).strip())


def caller(thread: int | None = None) -> Place:
    """The innermost line of the learner's own code that is running: not of torch, of perflab, or of a library.

    `thread` is the one to look at when this one has no such line: a backward pass runs on threads of its own,
    while the thread that asked for it stands still. Without any, the innermost line outside torch and perflab;
    an empty Place where there is none either.
    """
    stacks = [sys._getframe(1)]  # its own frame in its own variable would keep every tensor of the step alive
    if thread is not None and thread != threading.get_ident():
        stacks.append(sys._current_frames().get(thread))
    for wanted in (is_own, lambda file: not is_instrument(file)):
        for frame in (f for start in stacks for f in frames(start)):
            if wanted(frame.f_code.co_filename):
                return place(frame.f_code.co_filename, frame.f_lineno)
    return Place()


def frames(frame) -> Iterator:
    """A frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_cell(file: str) -> bool:
    """Is this the file name that Jupyter or Colab gives to a cell?"""
    return file.startswith("<ipython-input-") or "/ipykernel_" in file or "/ipython-input-" in file


def is_instrument(file: str) -> bool:
    """Is this a file of torch or of perflab?"""
    return file.startswith((TORCH, PERFLAB))


def is_own(file: str) -> bool:
    """Is this the learner's own code: a cell, or a file outside torch, perflab and the installed libraries?"""
    if is_cell(file):
        return True
    library = file.startswith(("<", _STDLIB)) or "site-packages" in file or "dist-packages" in file
    return not (library or is_instrument(file))
