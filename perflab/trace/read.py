"""The file of a trace that torch.profiler wrote, as tables of whole nanoseconds. What they mean is not said here."""

import functools
import gzip
import json
import math
import re
import sys
import zlib
from decimal import Decimal
from pathlib import Path

import numpy as np

from perflab.bench.profiler import exported
from perflab.errors import PerflabError, first_line

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
TABLES = dict.fromkeys(KINDS, "device") | {
    "cpu_op": "operators",
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "user_annotation": "notes",
    "python_function": "frames",
}
COLUMNS = ("start", "end", "name", "thread", "correlation")
DEVICE_COLUMNS = (*COLUMNS, "kind", "gpu", "blocks")
MEMORY_COLUMNS = ("time", "thread", "gpu", "total")
EXPORT = "export one with prof.export_chrome_trace('trace.json.gz') after a torch.profiler run"

_FRAME = re.compile(r"^(?P<path>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib/python3\.\d+)/|^<")
_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchvision", "triton", "numpy", "pandas", "PIL", "tqdm", "psutil"),
    *("IPython", "ipykernel", "tornado", "traitlets", "zmq", "jupyter_client", "matplotlib", "ipywidgets"),
}


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


class Recording:
    """The events of a trace in numpy's record arrays: each column is an attribute, of whole numbers.

    operators, calls (CUDA runtime and driver), notes (annotations), frames (the user's own Python): start, end
        (ns), name and thread (numbers), correlation (-1 where none). Ordered by thread, start, enclosing first.
    device: the same columns and kind (of KINDS), gpu (number of the device), blocks (of the grid, -1 where none).
    memory: time (ns), thread, gpu and total, the bytes that the device's allocator has given out; by time.
    names[i] decodes the names; `properties` are those of each device by its number.

    Raises PerflabError for an event that torch does not write.
    """

    def __init__(self, source: str, events: list, properties: dict[int, dict]):
        self.source, self.events, self.properties = source, len(events), properties
        self._name_numbers: dict[str, int] = {}
        self._thread_numbers: dict[tuple, int] = {}
        rows = {table: [] for table in (*TABLES.values(), "memory")}
        for number, event in enumerate(events, 1):
            try:
                self._add(event, rows)
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
                raise PerflabError(
                    f"Event {number:,} of {source} is none that torch.profiler writes ({first_line(error)}); {EXPORT}."
                ) from error
        self.names = list(self._name_numbers)
        self.operators, self.calls = _spans(rows["operators"]), _spans(rows["calls"])
        self.notes, self.frames = _spans(rows["notes"]), _spans(rows["frames"])
        self.device = _spans(rows["device"], DEVICE_COLUMNS)
        self.memory = _table(sorted(rows["memory"]), MEMORY_COLUMNS)

    def _add(self, event: dict, rows: dict[str, list]):
        """One event as a row of its table. Categories that nobody reads are passed over."""
        category, name, arguments = event.get("cat"), event.get("name", ""), event.get("args") or {}
        if category == "cpu_instant_event" and name == "[memory]" and arguments.get("Device Type") == 1:  # CUDA
            gpu, total = int(arguments.get("Device Id", 0)), int(arguments.get("Total Allocated", 0))
            rows["memory"].append((nanoseconds(event["ts"]), self._thread(event), gpu, total))
        table = TABLES.get(category)
        if table == "frames":
            name = own_frame(name)
        if event.get("ph") != "X" or table is None or name is None:
            return
        if not isinstance(name, str):
            raise TypeError(f"its name is {name!r}")
        start, duration = nanoseconds(event["ts"]), nanoseconds(event.get("dur", 0))
        name_number = self._name_numbers.setdefault(name, len(self._name_numbers))
        row = (start, start + max(0, duration), name_number, self._thread(event), int(arguments.get("correlation", -1)))
        if table == "device":
            grid, gpu = arguments.get("grid"), arguments.get("device", event.get("pid", 0))
            row += (KINDS.index(category), int(gpu), math.prod(grid) if grid else -1)
        rows[table].append(row)

    def _thread(self, event: dict) -> int:
        return self._thread_numbers.setdefault((event.get("pid"), event.get("tid")), len(self._thread_numbers))

    def matching(self, pattern: str, spans: np.recarray) -> np.ndarray:
        """Per event of a table: is the regular expression found in its name?"""
        matches = np.array([re.search(pattern, name) is not None for name in self.names], bool)
        return matches[spans.name]


def _table(rows: list[tuple], columns: tuple[str, ...]) -> np.recarray:
    return np.array(rows, [(column, np.int64) for column in columns]).view(np.recarray)


def _spans(rows: list[tuple], columns: tuple[str, ...] = COLUMNS) -> np.recarray:
    spans = _table(rows, columns)
    return spans[np.lexsort((-spans.end, spans.start, spans.thread))]


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
    whole = whole if isinstance(whole, dict) else {"traceEvents": whole}
    events, devices = whole.get("traceEvents"), whole.get("deviceProperties")
    if not isinstance(events, list):
        raise PerflabError(f"{called} is no trace: it has no list of traceEvents; {EXPORT}.")
    if not events:
        raise PerflabError(f"{called} holds no events: profile at least one step; {EXPORT}.")
    known = [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    return Recording(called, events, {device.get("id"): device for device in known})


def _json(path: Path) -> dict | list:
    """The content of a file, packed or not; fractions stay exact, since a float loses the nanoseconds of 10^15 us."""
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return json.loads(content.decode("utf-8-sig", errors="replace"), strict=False, parse_float=Decimal)
    except EOFError:
        why = "is cut short"
    except (gzip.BadGzipFile, zlib.error) as error:
        why = f"is damaged ({error})"
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
    except json.JSONDecodeError as error:
        why = _flaw(error)
    except (ValueError, RecursionError) as error:
        why = f"is no JSON ({first_line(error)})"
    raise PerflabError(f"{path.name} {why}; {EXPORT}.")


def _flaw(error: json.JSONDecodeError) -> str:
    if not error.doc.strip():
        return "is empty"
    if error.pos >= len(error.doc.rstrip()) - 1 or error.msg.startswith("Unterminated"):
        return "is cut short: it ends in the middle of its JSON"
    return f"is no JSON ({error.msg} at line {error.lineno}, column {error.colno})"
