"""The exclusive use of a device for one round, between users of one host.

A file lock, which the system frees when its holder dies, forked children or not. A waiter first queues at a
turnstile, so that a holder who comes straight back does not starve the others.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from perflab.errors import PerflabError

POLL_S = 0.01
_INHERITED = "PERFLAB_SEAT_HELD"  # devices whose seat this process or a parent holds, by comma


def folder() -> Path:
    """Where the locks lie: $PERFLAB_SEATS (for containers, a shared mount), else below the temp folder."""
    return Path(os.environ.get("PERFLAB_SEATS") or Path(tempfile.gettempdir()) / "perflab-seats")


def device_name() -> str:
    """The device whose seat a measurement takes: the GPU's UUID once this process uses CUDA, else "cpu"."""
    import torch

    if not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _timeout_s() -> float:
    text = os.environ.get("PERFLAB_SEAT_TIMEOUT") or "600"
    try:
        return float(text)
    except ValueError:
        raise PerflabError(f"PERFLAB_SEAT_TIMEOUT={text} is no number: give seconds, such as 600.") from None


@contextlib.contextmanager
def hold(name: str, stop: Callable[[], None] = lambda: None, timeout_s: float | None = None):
    """Wait for the seat of device `name`, keep it for the block, give it back. Yields the seconds waited.

    `stop` is called while waiting and may raise. A process that holds the seat already, or whose parent
    holds it, goes straight in. Raises PerflabError naming the holder after `timeout_s`
    ($PERFLAB_SEAT_TIMEOUT, default 600).
    """
    before = os.environ.get(_INHERITED, "")
    if name in before.split(","):
        yield 0.0
        return
    began, where = time.monotonic(), folder()
    holder = where / f"{name}.json"
    limit = _timeout_s() if timeout_s is None else timeout_s
    try:
        with contextlib.suppress(FileExistsError):
            where.mkdir(parents=True)
            where.chmod(0o1777)  # every user of the host takes part; mkdir's own mode is cut by the umask
        seat, turn = (FileLock(where / f"{name}.{kind}", mode=0o666) for kind in ("lock", "turn"))
        with _acquired(turn, stop, began + limit):
            _acquired(seat, stop, began + limit)
    except Timeout:
        raise PerflabError(
            f"The seat of {name} is held by {_holder(holder)}: wait for it, end that process, or "
            "set PERFLAB_SEAT_TIMEOUT to more seconds."
        ) from None
    except OSError as e:
        raise PerflabError(
            f"The seat of {name} cannot be taken in {where} ({e.strerror}): set PERFLAB_SEATS to a folder "
            "that every user of this machine can write."
        ) from None
    with seat:
        seat.release()  # one of the two levels: the block holds the other
        with contextlib.suppress(OSError):  # a courtesy to those who wait
            holder.write_text(json.dumps({"pid": os.getpid(), "since": time.strftime("%H:%M:%S")}))
            holder.chmod(0o666)
        os.environ[_INHERITED] = ",".join(filter(None, [before, name]))
        try:
            yield time.monotonic() - began
        finally:
            os.environ.pop(_INHERITED) if not before else os.environ.update({_INHERITED: before})


def _acquired(lock: FileLock, stop: Callable[[], None], until: float):
    """Wait for the lock, asking `stop` again and again. Raises filelock's Timeout once `until` has passed."""
    while True:
        with contextlib.suppress(Timeout):
            return lock.acquire(timeout=0)
        stop()
        if time.monotonic() > until:
            raise Timeout(lock.lock_file)
        time.sleep(POLL_S)


def _holder(note: Path) -> str:
    try:
        who = json.loads(note.read_text())
        return f"process {who['pid']} since {who['since']}"
    except (OSError, ValueError, KeyError):
        return "a process that left no name"
