"""What a process holds, counted in it: memory, threads, descriptors, handles.

Workers import this file: torch and numpy may enter, nothing that draws or teaches.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import get_worker_info

from .walk import lengths, open_things, reach

# Libraries whose handles must not be carried over a fork, as their manuals say.
OF_ONE_PROCESS = ("h5py", "lmdb", "netCDF4", "tables", "sqlite3", "_socket", "socket", "psycopg2", "pymysql", "redis")


def census(roots: Mapping[str, object]) -> dict:
    """What this process holds: private bytes, threads and their CPU time, descriptors, lengths of containers."""
    info = get_worker_info()
    return {
        "id": info.id if info else -1,
        "pid": os.getpid(),
        "private_bytes": private_bytes(),
        "threads": _torch_threads(),
        "busy_ns": _busy(),
        "fds": count_fds(),
        "lengths": lengths(roots),
        "open": {path: id(x) for path, x in of_one_process(roots)},
    }


def _torch_threads() -> int:
    return max(getattr(torch.set_num_threads, "asked", 0), torch.get_num_threads())


def private_bytes() -> int:
    """Bytes that this process alone has written; what it shares with its parent, or reads from files, left out."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    except OSError:
        import psutil

        return psutil.Process().memory_full_info().uss


def _busy() -> dict[int, int]:
    """CPU time of each thread of this process, in ns, by its id; empty where the system does not tell."""
    busy = {}
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/self/task/{task}/schedstat") as line:
                busy[int(task)] = int(line.read().split()[0])
    return busy


@contextlib.contextmanager
def running():
    """Notes, every few milliseconds, how many other threads of this process run or wait for a core."""
    at_once: list[int] = []
    done = threading.Event()

    def look():
        me = threading.get_native_id()
        while not done.wait(0.003):
            at_once.append(sum(_runs(task) for task in os.listdir("/proc/self/task") if int(task) != me))

    watcher = threading.Thread(target=look, daemon=True)
    if os.path.isdir("/proc/self/task"):
        watcher.start()
    try:
        yield at_once
    finally:
        done.set()
        if watcher.is_alive():
            watcher.join()


def _runs(task: str) -> bool:
    try:
        with open(f"/proc/self/task/{task}/stat") as line:
            return line.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it ended meanwhile
        return False


def count_fds() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0


def of_one_process(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Open handles of libraries that forbid their use on both sides of a fork."""
    for path, x in reach(roots):
        if type(x).__module__.partition(".")[0] not in OF_ONE_PROCESS or isinstance(x, type):
            continue
        if isinstance(x, sqlite3.Connection):
            with contextlib.suppress(sqlite3.Error):
                _ = x.total_changes  # raises when closed
                yield path, x
        elif type(x).__name__ in ("File", "Environment", "Dataset") and x:
            yield path, x
    for path, x, _ in open_things(roots):
        if type(x).__module__ in ("socket", "_socket"):
            yield path, x
