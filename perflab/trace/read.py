"""The events of a trace that torch.profiler wrote, as columns of whole nanoseconds. What they mean is not said here."""

import functools
import gzip
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
from perflab.errors import PerflabError, first_line

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
EXPORT = "export one with prof.export_chrome_trace('trace.json.gz') after a torch.profiler run"

_FRAME = re.compile(r"^(?P<path>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "triton", "numpy", "pandas", "PIL", "tqdm", "psutil"}
_LIBRARIES |= {"IPython", "ipykernel", "tornado", "traitlets", "zmq", "jupyter_client", "matplotlib", "ipywidgets"}
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
    """Whole nanoseconds of a time in microseconds, as torch writes it."""
    return round(microseconds * 1000)


def recorded(source) -> Recording:
    """Reads a path (.json or .json.gz), the dict of a trace, or a finished torch profiler.

    Raises PerflabError, one sentence, for what is missing, empty, cut short, no JSON, or no trace.
    """
    if isinstance(source, dict | list):
        whole, called = source, "The trace"
    elif hasattr(source, "export_chrome_trace"):
        whole, called = json.loads(exported(source), strict=False), "The profiler's trace"
    elif isinstance(source, str | Path):
        whole, called = _json(Path(source)), Path(source).name
    else:
        raise PerflabError(f"A trace is a path, a dict or a torch profiler, not {type(source).__name__}: {EXPORT}.")
    events = whole.get("traceEvents") if isinstance(whole, dict) else whole
    if not isinstance(events, list):
        raise PerflabError(f"{called} is no trace: it has no list of traceEvents; {EXPORT}.")
    recording = Recording(called)
    if isinstance(whole, dict):
        _properties(recording, whole.get("deviceProperties"))
    try:
        for event in events:
            recording.add(event)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        number = recording.events
        raise PerflabError(
            f"Event {number:,} of {called} is none that torch.profiler writes ({first_line(error)}); {EXPORT}."
        ) from error
    if not recording.events:
        raise PerflabError(f"{called} holds no events: profile at least one step; {EXPORT}.")
    recording.close()
    return recording


def _json(path: Path) -> dict | list:
    """The content of a file, packed or not; fractions stay exact, since a float loses the nanoseconds of 10^15 us."""
    try:
        raw = path.read_bytes()
        packed = raw[:2] == b"\x1f\x8b"
        text = (gzip.decompress(raw) if packed else raw).decode("utf-8-sig", errors="replace")
    except EOFError:
        raise PerflabError(f"{path.name} is cut short; {EXPORT}.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise PerflabError(f"{path.name} is damaged ({error}); {EXPORT}.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PerflabError(f"{path.name} cannot be read ({why}); {EXPORT}.") from None
    if not text.strip():
        raise PerflabError(f"{path.name} is empty; {EXPORT}.")
    try:
        return json.loads(text, strict=False, parse_float=Decimal)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated"):
            raise PerflabError(f"{path.name} is cut short: it ends in the middle of its JSON; {EXPORT}.") from None
        where = f"line {error.lineno}, column {error.colno}"
        raise PerflabError(f"{path.name} is no JSON ({error.msg} at {where}); {EXPORT}.") from None
    except (ValueError, RecursionError) as error:
        raise PerflabError(f"{path.name} is no JSON ({first_line(error)}); {EXPORT}.") from None


def _properties(recording: Recording, devices):
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            recording.properties[device["id"]] = device
