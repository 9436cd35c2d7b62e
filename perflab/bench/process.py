"""New interpreters for what may spoil this one: out of memory, a failed capture, a crash, a hang.

The child's standard input is a lifeline: when the parent is gone, however it went, the child ends itself and
its group. Only our own bytes are ever unpickled.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cloudpickle
import psutil

from perflab.errors import PerflabError, first_line

from . import files, interrupt, machine, record
from .plan import Job
from .result import Result
from .units import quantity

POLL_S = 0.02
START_S = 60.0  # until a new interpreter has imported what it needs


def call(f: Callable, *args, timeout_s: float = 120.0, memory_bytes: int | None = None):
    """What `f(*args)` returns, from a new interpreter. Function, arguments and value travel by cloudpickle.

    Raises PerflabError, in one sentence, where `f` raised, or where its process died, gave no answer within
    `timeout_s` seconds, or took more than `memory_bytes` (default: 80 % of what is free).
    """
    with tempfile.TemporaryDirectory(prefix="perflab-") as name:
        value, why = _run(Path(name), f, args, timeout_s, memory_bytes)
    if why:
        raise PerflabError(f"In a process of its own: {why}")
    return value


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
            result, why, culprit = _attempt(replace(job, values=left), timeout_s, memory_bytes)
            if not why:
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


def _attempt(job: Job, timeout_s: float, memory_bytes: int | None) -> tuple[Result, str, str]:
    """One schedule in one process: its result, why the process was ended or "", and the value it was at."""
    with tempfile.TemporaryDirectory(prefix="perflab-") as name:
        folder, why, stopped = Path(name), "", ""
        try:
            _, why = _run(folder, _measure, (job, folder), timeout_s, memory_bytes)
        except KeyboardInterrupt:
            stopped = "interrupted"
        try:
            result = Result.from_json(json.loads((folder / "result.json").read_text(encoding="utf8")))
        except (OSError, ValueError):
            result = job.empty()
        result.stopped = stopped or result.stopped
        visit = folder / "visit"
        return result, why, visit.read_text(encoding="utf8") if visit.exists() else ""


def _measure(job: Job, folder: Path):
    """In the child: run the schedule, write the result after each round and the value that is visited."""
    from .schedule import Schedule  # torch: seconds that not every call needs

    def keep(result: Result):
        record.write(folder / "result.json", result.to_json())

    def visiting(name: str):
        (folder / "visit").write_text(name, encoding="utf8")

    def waiting():
        os.utime(folder / "visit")  # not silent: somebody else has the device

    os.environ["PERFLAB_PROGRESS"] = "off"
    keep(Schedule(job, before_visit=visiting, after_round=keep, waiting=waiting).go())


# -- the process


def _run(folder: Path, f: Callable, args: tuple, timeout_s: float, memory_bytes: int | None) -> tuple[object, str]:
    """Run `f(*args)` in a child that writes into `folder`: its value, and why there is none, or ""."""
    limit = memory_bytes or int(0.8 * machine.ram_bytes())
    try:
        (folder / "job").write_bytes(cloudpickle.dumps((f, args)))
    except Exception as e:
        raise PerflabError(
            f"This cannot travel to a new process ({first_line(e)}): build such things in prepare, not before."
        ) from None
    with interrupt.Interruptible() as door:
        child, why = _start(folder), ""
        began = time.time()
        try:
            while child.poll() is None and not why:
                door.call(time.sleep, POLL_S)
                why = _trouble(child, folder, began, timeout_s, limit)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # it closes its workers and writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.7)
        finally:
            _end(child)
    door.check()
    if why:
        return None, why
    if (folder / "outcome").exists():
        return cloudpickle.loads((folder / "outcome").read_bytes())
    if child.returncode < 0:
        return None, f"its process was ended by {signal.Signals(-child.returncode).name}"
    lines = (folder / "stderr").read_text(errors="replace").strip().splitlines()
    return None, f"its process ended with status {child.returncode}{f': {lines[-1][:200]}' if lines else ''}"


def _start(folder: Path) -> subprocess.Popen:
    with open(folder / "stderr", "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "perflab.bench.process", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,
        )


def _trouble(child: subprocess.Popen, folder: Path, began: float, timeout_s: float, limit: int) -> str:
    """Why the child has to be ended, or ""."""
    try:
        heard = (folder / "visit").stat().st_mtime
    except OSError:
        heard = began + START_S
    if time.time() - heard > timeout_s:
        return f"no answer within {timeout_s:g} s"
    used = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(child.pid)
        for p in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used += p.memory_info().rss
    return f"took more than {quantity(limit, 'bytes')} of memory" if used > limit else ""


def _end(child: subprocess.Popen):
    """End the child's whole session: its DataLoader workers are in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.stdin.close()
    child.wait()


def _follow_parent():
    """End this process group when the lifeline breaks: the parent died without a word."""
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(folder: Path):
    """The child: calls what it was sent, and writes its value and why there is none, or ""."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # should memory run out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    f, args = cloudpickle.loads((folder / "job").read_bytes())
    (folder / "visit").touch()
    try:
        outcome = cloudpickle.dumps((f(*args), ""))
    except Exception as e:
        outcome = cloudpickle.dumps((None, first_line(e)))
    files.put(folder / "outcome", outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
