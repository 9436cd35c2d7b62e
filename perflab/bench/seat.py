"""The exclusive use of a device for one round, between users of one host.

A flock on a file: the kernel frees it when the holder dies. Forked children close their copy of the
descriptor, or a DataLoader worker would keep its dead parent's seat. A waiter first queues at a
turnstile, so that a holder who comes straight back does not starve the others.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from perflab.errors import PerflabError

POLL_S = 0.01
_INHERITED = "PERFLAB_SEAT_HELD"  # devices whose seat a parent process holds for us, by comma
_descriptors: set[int] = set()
_depth: dict[str, int] = {}


def _close_in_child():
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _depth.clear()


os.register_at_fork(after_in_child=_close_in_child)


def folder() -> Path:
    """Where the locks lie: $PERFLAB_SEATS (for containers, a shared mount), else below the temp folder."""
    return Path(os.environ.get("PERFLAB_SEATS") or Path(tempfile.gettempdir()) / "perflab-seats")


def device_name() -> str:
    """The device whose seat a measurement takes: the GPU's UUID once this process uses CUDA, else "cpu"."""
    import torch

    if not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _open(name: str) -> int:
    where = folder()
    try:
        with contextlib.suppress(FileExistsError):
            where.mkdir(parents=True)
            where.chmod(0o1777)  # every user of the host takes part
        fd = os.open(where / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise PerflabError(
            f"The seat of {name} cannot be taken in {where} ({e.strerror}): set PERFLAB_SEATS to a folder "
            "that every user of this machine can write."
        ) from None
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o666)
    _descriptors.add(fd)
    return fd


def _shut(fd: int):
    _descriptors.discard(fd)
    os.close(fd)  # frees the lock too


def _lock(fd: int, stop: Callable[[], None], until: float, holder_fd: int, name: str):
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        stop()
        if time.monotonic() > until:
            raise PerflabError(
                f"The seat of {name} is held by {_holder(holder_fd)}: wait for it, end that process, or "
                "set PERFLAB_SEAT_TIMEOUT to more seconds."
            )
        time.sleep(POLL_S)


def _holder(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, 400, 0))
        return f"process {note['pid']} since {time.strftime('%H:%M:%S', time.localtime(note['since']))}"
    except (ValueError, KeyError):
        return "a process that left no name"


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
    if _depth.get(name) or name in os.environ.get(_INHERITED, "").split(","):
        yield 0.0
        return
    began = time.monotonic()
    limit = _timeout_s() if timeout_s is None else timeout_s
    before = os.environ.get(_INHERITED)
    with contextlib.ExitStack() as stack:
        seat = _open(name)
        stack.callback(_shut, seat)
        turn = _open(f"{name}.turn")
        try:
            _lock(turn, stop, began + limit, seat, name)
            _lock(seat, stop, began + limit, seat, name)
        finally:
            _shut(turn)
        with contextlib.suppress(OSError):  # a courtesy to those who wait; a full disk takes it away
            os.ftruncate(seat, 0)
            os.pwrite(seat, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
        _depth[name] = 1
        os.environ[_INHERITED] = ",".join(filter(None, [before, name]))
        try:
            yield time.monotonic() - began
        finally:
            del _depth[name]
            os.environ.pop(_INHERITED) if before is None else os.environ.update({_INHERITED: before})
