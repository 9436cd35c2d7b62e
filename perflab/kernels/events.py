"""The events of a trace that torch.profiler wrote, read as a stream into columns of whole nanoseconds.

A file of many hundred megabytes is held neither as text nor as dicts. What the events mean is not said here.
"""

import functools
import gzip
import io
import json
import math
import re
import sys
import zlib
from array import array
from decimal import Decimal
from pathlib import Path

import numpy as np

from perflab.bench.profiler import exported
from perflab.errors import PerflabError

CHUNK = 1 << 20  # characters read at a time
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
EXPORT = "export one with prof.export_chrome_trace('trace.json.gz') after a torch.profiler run"

_FRAME = re.compile(r"^(?P<path>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "triton", "numpy", "pandas", "PIL", "tqdm", "psutil"}
_LIBRARIES |= {"IPython", "ipykernel", "tornado", "traitlets", "zmq", "jupyter_client", "matplotlib", "ipywidgets"}
_BLANK = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[, \t\r\n]*")
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib/python3\.\d+)/|^<")


@functools.lru_cache(maxsize=1 << 16)
def own_frame(name: str) -> str | None:
    """`file.py(line): function` of a Python frame of the user's own code; None for libraries and built-ins.

    torch strips the folders of sys.path from the names, so a library is known by its first part. The line is
    where the function begins, or where a generator goes on.
    """
    frame = _FRAME.match(name)
    if frame is None or _INSTALLED.search(frame["path"]):
        return None
    path = Path(frame["path"])
    if path.parts[0].removesuffix(".py") in _LIBRARIES or path.name == "__init__.py":
        return None
    return f"{path.name}({frame['line']}): {frame['function']}"


class Spans:
    """Host events of one kind: columns start, end (ns), name, thread (numbers) and correlation (-1 where none)."""

    COLUMNS = ("start", "end", "name", "thread", "correlation")

    def __init__(self):
        self._flat = array("q")
        self.add = self._flat.extend  # one row of numbers, in the order of COLUMNS

    def close(self):
        """Columns as numpy arrays, ordered by thread, start and enclosing before enclosed."""
        rows = np.frombuffer(self._flat, np.int64) if self._flat else np.zeros(0, np.int64)
        rows = rows.reshape(-1, len(self.COLUMNS))
        order = np.lexsort((-rows[:, 1], rows[:, 0], rows[:, 3]))
        for name, column in zip(self.COLUMNS, rows.T, strict=True):
            setattr(self, name, column[order])
        del self._flat, self.add

    def __len__(self) -> int:
        return len(self.start)


class Device(Spans):
    """Device events: kind indexes KINDS, blocks are those of the grid, -1 where not recorded."""

    COLUMNS = (*Spans.COLUMNS, "kind", "device", "blocks")


class Recording:
    """What was read. `names[i]` and `threads[i]` decode the columns; times count from `origin` nanoseconds.

    device, operators, calls (CUDA runtime and driver), notes (annotations), frames (the user's own Python),
    memory ((time, thread, device, bytes allocated) of the device's allocator); properties of the devices.
    """

    def __init__(self, source: str):
        self.source = source
        self.names: list[str] = []
        self.threads: list[tuple] = []
        self.device, self.operators, self.calls, self.notes, self.frames = Device(), Spans(), Spans(), Spans(), Spans()
        self.memory: list[tuple[int, int, int, int]] = []
        self.properties: dict[int, dict] = {}
        self.events = 0
        self._kept = dict.fromkeys(KINDS, self.device) | {
            "cpu_op": self.operators,
            "cuda_runtime": self.calls,
            "cuda_driver": self.calls,
            "user_annotation": self.notes,
            "python_function": self.frames,
        }
        self._name_of: dict[str, int] = {}
        self._thread_of: dict[tuple, int] = {}

    def name(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"its name is {text!r}")
        if (i := self._name_of.get(text)) is None:
            i = self._name_of[text] = len(self.names)
            self.names.append(text)
        return i

    def thread(self, event: dict) -> int:
        key = (event.get("pid"), event.get("tid"))
        if (i := self._thread_of.get(key)) is None:
            i = self._thread_of[key] = len(self.threads)
            self.threads.append(key)
        return i

    def add(self, event: dict):
        """One trace event. Categories that nobody reads are dropped here."""
        self.events += 1
        category = event.get("cat")
        if event.get("ph") != "X":
            if category == "cpu_instant_event" and event.get("name") == "[memory]":
                self._allocation(event)
            return
        kept = self._kept.get(category)
        if kept is None:
            return
        name, arguments = event.get("name", ""), event.get("args") or {}
        if kept is self.frames and (name := own_frame(name)) is None:
            return
        start, lasts = nanoseconds(event["ts"]), nanoseconds(event.get("dur", 0))
        row = start, start + max(0, lasts), self.name(name), self.thread(event), arguments.get("correlation", -1)
        if kept is self.device:
            grid, number = arguments.get("grid"), arguments.get("device", event.get("pid", 0))
            row += KINDS.index(category), int(number), math.prod(grid) if grid else -1
        kept.add(row)

    def _allocation(self, event: dict):
        arguments = event.get("args") or {}
        if arguments.get("Device Type") == 1:  # CUDA
            at, total = nanoseconds(event["ts"]), int(arguments.get("Total Allocated", 0))
            self.memory.append((at, self.thread(event), int(arguments.get("Device Id", 0)), total))

    def close(self):
        for spans in (self.device, self.operators, self.calls, self.notes, self.frames):
            spans.close()
        self.memory.sort()


def nanoseconds(microseconds) -> int:
    """Whole nanoseconds, exactly as written: no rounding to microseconds, no error of a binary fraction."""
    if isinstance(microseconds, int):
        return 1000 * microseconds
    exact = microseconds if isinstance(microseconds, Decimal) else Decimal(str(microseconds))
    return round(exact * 1000)


def recorded(source) -> Recording:
    """Reads a path (.json or .json.gz), the dict of a trace, or a finished torch profiler.

    Raises PerflabError, one sentence, for what is missing, empty, cut short, no JSON, or no trace.
    """
    if isinstance(source, dict | list):
        return _taken(source, "the trace")
    if hasattr(source, "export_chrome_trace"):
        recording = Recording("the profiler's trace")
        _Stream(io.StringIO(exported(source)), recording.source).into(recording)
        return _closed(recording)
    if isinstance(source, str | Path):
        return _read(Path(source), Path(source).name or str(source) or "an empty path")
    raise PerflabError(f"A trace is a path, a dict or a torch profiler, not {type(source).__name__}: {EXPORT}.")


def _taken(whole: dict | list, called: str) -> Recording:
    events = whole if isinstance(whole, list) else whole.get("traceEvents")
    if not isinstance(events, list):
        raise PerflabError(f"{_start(called)} is no trace: it has no list of traceEvents; {EXPORT}.")
    recording = Recording(called)
    if isinstance(whole, dict):
        _properties(recording, whole.get("deviceProperties"))
    for event in events:
        _add(recording, event)
    return _closed(recording)


def _read(path: Path, called: str) -> Recording:
    recording = Recording(called)
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            _Stream(file, called).into(recording)
    except EOFError as error:
        raise _cut(called, recording) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise PerflabError(f"{_start(called)} is damaged: {error}; export it again.") from error
    except (OSError, ValueError) as error:  # a ValueError where the path itself is none
        why = getattr(error, "strerror", None) or error
        raise PerflabError(f"{_start(called)} cannot be read: {why}; {EXPORT}.") from error
    return _closed(recording)


class _Stream:
    """JSON text that is decoded value by value, a chunk of the file at a time."""

    def __init__(self, file, called: str):
        self.file, self.called = file, called
        self.text, self.at, self.ended = "", 0, False
        self.decode = json.JSONDecoder(parse_float=Decimal, strict=False).raw_decode

    def more(self) -> bool:
        chunk = self.file.read(CHUNK)
        self.ended = not chunk
        self.text, self.at = self.text[self.at :] + chunk, 0
        return bool(chunk)

    def sign(self, recording: Recording) -> str:
        """The next character that is not white space, which stays."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                raise _cut(self.called, recording)

    def value(self, recording: Recording):
        self.sign(recording)
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if error.pos < len(self.text) - CHUNK:  # more text does not mend it
                    raise self.wrong(recording) from error
                if not self.more():
                    raise (_cut(self.called, recording) if recording.events else self.wrong(recording)) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without an end
                raise self.wrong(recording) from error
            else:
                if end == len(self.text) and not self.ended and self.more():
                    continue  # a number at the very end of a chunk may go on
                self.at = end
                return value

    def wrong(self, recording: Recording) -> PerflabError:
        where = f"after {recording.events:,} events" if recording.events else "at its beginning"
        return PerflabError(f"{_start(self.called)} is no JSON {where}: it is no trace of torch.profiler; {EXPORT}.")

    def into(self, recording: Recording):
        if not self.more():
            raise PerflabError(f"{_start(self.called)} is empty: {EXPORT}.")
        opening = self.sign(recording)
        if opening == "[":
            return self.array(recording)
        if opening != "{":
            raise self.wrong(recording)
        found, opening = False, ""
        self.at += 1
        while (sign := self.sign(recording)) != "}":
            self.at += sign == ","
            if sign == "," and self.sign(recording) == "}":
                break
            key = self.value(recording)
            if not isinstance(key, str) or self.sign(recording) != ":":
                raise self.wrong(recording)
            self.at += 1
            if key == "traceEvents" and self.sign(recording) == "[":
                found = True
                self.array(recording)
            elif key == "deviceProperties":
                _properties(recording, self.value(recording))
            else:
                self.value(recording)
        if not found:
            raise PerflabError(f"{_start(self.called)} is no trace: it has no list of traceEvents; {EXPORT}.")

    def array(self, recording: Recording):
        self.at += 1
        while True:
            self.at = _SEPARATOR.match(self.text, self.at).end()
            if self.at == len(self.text) and self.more():
                continue
            if self.sign(recording) == "]":
                break
            _add(recording, self.value(recording))
        self.at += 1


def _add(recording: Recording, event):
    try:
        recording.add(event)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise PerflabError(
            f"Event {recording.events:,} of {recording.source} is none that torch.profiler writes "
            f"({type(error).__name__}: {error}); {EXPORT}."
        ) from error


def _properties(recording: Recording, devices):
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            recording.properties[device["id"]] = device


def _cut(called: str, recording: Recording) -> PerflabError:
    return PerflabError(
        f"{_start(called)} is cut short: it ends after {recording.events:,} events, before its closing bracket; "
        "export it again, and wait until the file is whole."
    )


def _closed(recording: Recording) -> Recording:
    if not recording.events:
        raise PerflabError(f"{_start(recording.source)} holds no events: profile at least one step; {EXPORT}.")
    recording.close()
    return recording


def _start(called: str) -> str:
    return called[:1].upper() + called[1:] if called.startswith("the ") else called
