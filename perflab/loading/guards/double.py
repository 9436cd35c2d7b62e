"""A double of this process: a forked copy in which a check may read, seed, spoil and hang as it likes.

The learner's dataset, random streams and workers stay as they were. It may start DataLoader workers.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker

import torch

from perflab import paths

POLL_S = 0.1
PRELOADED = ["torch", "perflab.loading.guards.probe"]
PACKAGE = os.path.dirname(paths.__file__)


@dataclass
class CopyOutcome:
    """What a double said, in order, and how it ended: "" is well, "silent", "killed by signal 9", or its error.

    `where` is the line that a silent one stood at.
    """

    said: list
    ended: str = ""
    where: str = ""


def double(act: Callable[[Callable], object], silence_s: float) -> CopyOutcome:
    """Run `act(say)` in a forked copy of this process; what it says comes back.

    A copy that says nothing for `silence_s` seconds is ended, and so is everything it started, whichever
    way this ends. What it says must be picklable.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    lifeline, held = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder, open(f"{folder}/trace", "w+") as trace:
        settings = (act, here, there, lifeline, held, trace, silence_s, folder)
        child = multiprocessing.get_context("fork").Process(target=_live, args=settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of every fork in a process with threads
            child.start()
        try:
            there.close()
            os.close(lifeline)
            heard = _listen(here, child, silence_s)
        finally:
            for end in (os.killpg, os.kill):  # the group is not there yet in its first moment
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(child.pid, signal.SIGKILL)
            child.join()
            child.close()
            here.close()
            os.close(held)
        if heard.ended == "silent":
            heard.where = _place(trace)
    return heard


def _listen(here, child, silence_s: float) -> CopyOutcome:
    said, last = [], time.monotonic()
    while True:
        gone = child.exitcode is not None  # asked first: what it said before is still to be read
        try:
            while here.poll(0 if gone else POLL_S):
                kind, what = here.recv()
                if kind == "end":
                    return CopyOutcome(said, what)
                said.append(what)
                last = time.monotonic()
        except EOFError:
            child.join(POLL_S)
        if gone:
            code = child.exitcode
            return CopyOutcome(said, f"killed by signal {-code}" if code < 0 else f"ended with status {code}")
        if time.monotonic() - last > silence_s:
            return CopyOutcome(said, "silent")


def _live(act, here, there, lifeline, held, trace, silence_s, folder):
    """The copy: in a group of its own, quiet, one thread a pool; nothing of the learner's is ever destroyed in it."""
    here.close()
    os.close(held)
    gc.freeze()  # a loader's iterator that dies here would end the workers of the learner's own loader
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["tempdir"] = folder  # sockets of its workers, removed with it
    _forget_servers()
    os.setpgid(0, 0)
    pin_threads()
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()

    heard = [time.monotonic()]
    threading.Thread(target=_watch, args=(heard, 0.8 * silence_s, trace), daemon=True).start()

    def say(what):
        heard[0] = time.monotonic()
        there.send(("said", what))

    try:
        act(say)
        there.send(("end", ""))
    except BaseException as fault:
        there.send(("end", told(fault)))
    signal.pause()  # ended from outside, so that nothing is torn down here


def _watch(heard: list[float], silence_s: float, trace):
    """Where every thread stands, once nothing was said for so long. faulthandler's own timer does not serve: in a
    fork of a process that had set it, it waits for a thread that is not there."""
    while (left := heard[0] + silence_s - time.monotonic()) > 0:
        time.sleep(left)
    faulthandler.dump_traceback(file=trace)


def _follow(lifeline: int):
    """When the parent is gone, so is this group."""
    while os.read(lifeline, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _forget_servers():
    """The parent's servers for processes that are not forked are no children of this copy."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    server._lock, tracker._lock = threading.Lock(), threading.RLock()
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    tracker._fd = tracker._pid = None


def serve_forks():
    """In a double, before it starts workers by forkserver: one server that imports torch once for all.

    The tracker of semaphores is started outside the group that is killed in the end: it then removes
    what the killed leave in /dev/shm.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    os.setpgid(0, os.getpgid(os.getppid()))
    try:
        resource_tracker.ensure_running()
    finally:
        os.setpgid(0, 0)
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()  # waits for the server, so that no timeout of a worker counts its imports
    first.join()


class Threads:
    """Stands in for torch.set_num_threads: keeps the number asked for, and starts no thread.

    A forked copy of a process whose OpenMP pool has run hangs in its first parallel region of several threads.
    """

    asked = 0

    def __call__(self, n: int):
        self.asked = max(self.asked, int(n))


def pin_threads() -> Threads:
    """One thread for torch in this process from here on; gives what later notes who asks for more."""
    if not isinstance(torch.set_num_threads, Threads):
        torch.set_num_threads(1)
        torch.set_num_threads = Threads()
    torch.set_num_threads.asked = 0
    return torch.set_num_threads


def told(fault: BaseException) -> str:
    """An error in one line: its type and the first line of its words; of a worker's error the worker's words."""
    words = str(fault).strip().splitlines()
    if words and words[0].startswith("Caught ") and "worker" in words[0]:
        return words[-1][:200]
    return f"{type(fault).__name__}: {words[0][:200]}" if words else type(fault).__name__


def _place(trace) -> str:
    """The innermost line of the learner's that a dumped traceback names: "NeedsLock.py:12 in __getitem__"."""
    trace.seek(0)
    blocks = trace.read().split("Thread 0x")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', blocks[-1])
    library = (os.path.dirname(torch.__file__), os.path.dirname(threading.__file__), PACKAGE)
    for file, line, name in frames:
        if not file.startswith(library):
            return f"{os.path.basename(file)}, line {line}, in {name}"
    return ""
