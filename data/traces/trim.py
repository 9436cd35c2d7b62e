"""Small copies of torch.profiler's traces: what the course reads, without a machine's paths and names."""

import gzip
import json
from pathlib import Path

from perflab.trace.read import nanoseconds, own_frame

HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
ARGUMENTS = {
    *("correlation", "External id", "device", "stream", "grid", "block", "bytes", "graph id", "graph node id"),
    *("Total Allocated", "Bytes", "Device Id", "Device Type"),
}
PROPERTIES = ("id", "name", "numSms", "computeMajor", "computeMinor", "totalGlobalMem")
NAME_LENGTH = 400  # a kernel's template arguments can be thousands of characters


def trimmed(whole: dict) -> dict:
    """The events that are read, from time zero, threads counted from one, own Python frames as file.py(line)."""
    kept = [event for event in map(_kept, whole["traceEvents"]) if event is not None]
    first = min((nanoseconds(event["ts"]) for event in kept), default=0)
    threads: dict = {}
    for event in kept:
        event["ts"] = (nanoseconds(event["ts"]) - first) / 1000  # whole nanoseconds: floats near 1e13 lose one
        if event["cat"] not in DEVICE:
            event["tid"] = threads.setdefault((event["pid"], event["tid"]), len(threads) + 1)
            event["pid"] = "host"
    properties = [{key: d[key] for key in PROPERTIES if key in d} for d in whole.get("deviceProperties", [])]
    return {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": kept}


def _kept(event: dict) -> dict | None:
    category, name = event.get("cat"), event.get("name", "")
    if category == "python_function":
        name = own_frame(name)
        if name is None:
            return None
    elif category == "cpu_instant_event":
        if name != "[memory]" or event.get("args", {}).get("Device Type") != 1:
            return None
    elif category not in HOST | DEVICE:
        return None
    arguments = {key: value for key, value in event.get("args", {}).items() if key in ARGUMENTS}
    taken = {key: event[key] for key in ("ph", "cat", "pid", "tid", "ts", "dur") if key in event}
    return taken | {"name": name[:NAME_LENGTH]} | ({"args": arguments} if arguments else {})


def write(trace: dict, path: Path) -> int:
    """The trace as a compressed file, the same bytes for the same trace; the size of it in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(trace, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path.stat().st_size
