"""Processes of our own, for what may spoil one: out of memory, a failed capture, a crash, a hang.

The job goes to the child through its standard input, which stays open as a lifeline: when the parent is
gone, the child ends itself and its group. Only our own bytes are ever unpickled.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import psutil

from perflab.errors import PerflabError

from . import closing, machine, record
from .plan import Job
from .result import Result
from .schedule import Schedule
from .units import quantity

POLL_S = 0.02


class ByValue:
    """A map-style dataset or a collate function of a notebook cell that any DataLoader worker can receive.

    A worker started by spawn or forkserver cannot import what a cell defined; this carries its code.
    """

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __len__(self):
        return len(self.wrapped)

    def __getitem__(self, i):
        return self.wrapped[i]

    def __call__(self, *args):
        return self.wrapped(*args)

    def __reduce__(self):
        return cloudpickle.loads, (cloudpickle.dumps(self.wrapped),)


def fresh(timeout_s: float = 120.0, memory_bytes: int | None = None):
    """A `where` for `vary`: the whole schedule in a new process.

    A value that kills the process, is silent for `timeout_s` seconds, or takes more than `memory_bytes`
    (default: 80 % of what is free) becomes a row with its reason; the others are measured in another one.

    >>> vary("n", [1, 2], run, study="own.sum", where=fresh(timeout_s=60))  # doctest: +SKIP
    Result own.sum: n = 1, 2
    """

    def where(job: Job) -> Result:
        left, reasons, result = dict(job.values), {}, job.empty()
        _ = job.digest  # of source that the child cannot read
        while left:
            result, culprit, why = _attempt(replace(job, values=left), timeout_s, memory_bytes)
            if culprit is None:
                break
            for name in [culprit] if culprit in left else list(left):
                reasons[name] = why
                del left[name]
        result.values = list(job.values)
        result.work = job.empty().work | result.work
        result.reasons = reasons | result.reasons
        result.digest = job.digest
        return result

    return where


def _attempt(job: Job, timeout_s: float, memory_bytes: int | None) -> tuple[Result, str | None, str]:
    """One child process: its result, the value that ended it (or None), and why."""
    limit = memory_bytes or int(0.8 * machine.ram_bytes())
    try:
        payload = cloudpickle.dumps(job)
    except Exception as e:
        raise PerflabError(
            f"{job.study} cannot travel to a new process ({e}): build such things in prepare, not before."
        ) from None
    with tempfile.TemporaryDirectory(prefix="perflab-") as folder, closing.Door() as door:
        child = _start(payload, Path(folder))
        why = ""
        try:
            while child.poll() is None and not why:
                door.call(time.sleep, POLL_S)
                why = _trouble(child, Path(folder), timeout_s, limit)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # it closes its workers and writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.7)
        finally:
            _end(child)
        result = _written(Path(folder)) or job.empty()
        if door.hit:
            result.stopped = "interrupted"
        elif why or child.returncode != 0:
            return result, _visited(Path(folder)), why or _death(child.returncode, Path(folder))
        return result, None, ""


def _start(payload: bytes, folder: Path) -> subprocess.Popen:
    with open(folder / "stderr", "wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "perflab.bench.process", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,
        )
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(struct.pack("<Q", len(payload)) + payload)
        child.stdin.flush()
    return child


def _trouble(child: subprocess.Popen, folder: Path, timeout_s: float, limit: int) -> str:
    """Why the child has to be ended, or ""."""
    with contextlib.suppress(OSError):
        silent = time.time() - (folder / "visit").stat().st_mtime
        if silent > timeout_s:
            return f"no answer within {timeout_s:g} s"
    used = 0
    with contextlib.suppress(psutil.Error):
        me = psutil.Process(child.pid)
        for p in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used += p.memory_info().rss
    return f"took more than {quantity(limit, 'bytes')} of memory" if used > limit else ""


def _end(child: subprocess.Popen):
    """End the child's whole session: its DataLoader workers are in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.stdin.close()
    child.wait()


def _death(code: int, folder: Path) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = (folder / "stderr").read_text(errors="replace").strip().splitlines()
    return f"its process ended with status {code}{f': {lines[-1][:200]}' if lines else ''}"


def _visited(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "visit").read_text(encoding="utf8")
    return ""


def _written(folder: Path) -> Result | None:
    with contextlib.suppress(OSError, ValueError):
        return Result.from_json(json.loads((folder / "result.json").read_text(encoding="utf8")))
    return None


def _follow_parent():
    """End this process group when the lifeline breaks: the parent died without a word."""
    os.read(sys.stdin.fileno(), 1)  # below Python's buffers, whose lock a daemon thread must not hold at exit
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(folder: Path):
    """The child: receives a job, measures, writes the result after each round."""
    with contextlib.suppress(OSError):  # should memory run out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    (size,) = struct.unpack("<Q", sys.stdin.buffer.read(8))
    job = cloudpickle.loads(sys.stdin.buffer.read(size))
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ["PERFLAB_PROGRESS"] = "off"

    def keep(result: Result):
        record.write(folder / "result.json", result.to_json())

    def visiting(name: str):
        (folder / "visit").write_text(name, encoding="utf8")

    def waiting():
        with contextlib.suppress(OSError):  # not silent: somebody else has the seat
            os.utime(folder / "visit")

    keep(Schedule(job, before_visit=visiting, after_round=keep, waiting=waiting).go())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
