"""What a process holds, counted in it: memory, threads, descriptors, handles.

Workers import this file: torch and numpy may enter, nothing that draws or teaches.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil
import torch
from torch.utils.data import get_worker_info

from .walk import lengths, open_files, reach

# Libraries whose handles must not be carried over a fork, as their manuals say.
OF_ONE_PROCESS = ("h5py", "lmdb", "netCDF4", "tables", "sqlite3", "_socket", "socket", "psycopg2", "pymysql", "redis")


@dataclass
class Census:
    """What a process holds at a moment; `worker` is its number, -1 in the main process."""

    worker: int
    private_bytes: int
    threads: int  # that torch was asked for
    busy_ns: dict[int, int]  # CPU time by thread
    fds: int
    lengths: dict[str, int]  # of containers, by path
    handles: dict[str, int]  # id of each handle that is of one process, by path


def census(roots: Mapping[str, object]) -> Census:
    """Count in this process what `roots` lead to, and what the process holds."""
    return Census(
        worker=worker_number(),
        private_bytes=_private_bytes(),
        threads=max(getattr(torch.set_num_threads, "asked", 0), torch.get_num_threads()),
        busy_ns=_busy(),
        fds=len(descriptors()),
        lengths=lengths(roots),
        handles={path: id(x) for path, x in of_one_process(roots)},
    )


def worker_number() -> int:
    info = get_worker_info()
    return info.id if info else -1


def _private_bytes() -> int:
    """Bytes that this process alone has written; what it shares with its parent, or reads from files, left out."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    except OSError:
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
def counting_threads():
    """Notes, every few milliseconds, how many other threads of this process run or wait for a core."""
    running: list[int] = []
    done = threading.Event()

    def look():
        me = threading.get_native_id()
        while not done.wait(0.003):
            running.append(sum(_runs(task) for task in os.listdir("/proc/self/task") if int(task) != me))

    watcher = threading.Thread(target=look, daemon=True)
    if os.path.isdir("/proc/self/task"):
        watcher.start()
    try:
        yield running
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


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, and the name of what each is open on, "" where no system tells it."""
    names = {}
    for fd in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        try:
            names[int(fd)] = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).removesuffix(" (deleted)")
        except OSError:
            names[int(fd)] = ""
    return names


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
    for path, x, _ in open_files(roots):
        if type(x).__module__ in ("socket", "_socket"):
            yield path, x
