"""Forked copies of this process, in which a check may read, seed, spoil and hang as it likes.

What the learner made (dataset, random streams, workers) stays as it is. A copy may start DataLoader workers.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker

import torch

from perflab.errors import PerflabError, first_line

from .code import frames, is_own

POLL_S = 0.1


@dataclass
class CopyOutcome:
    """What a copy said, in order, and how it ended: "" is well, "silent", "killed by signal 9", or its error.

    `where` is the learner's line that a silent one stood at, or "".
    """

    said: list = field(default_factory=list)
    ended: str = ""
    where: str = ""


def fork(act: Callable[[Callable], object], silence_s: float) -> CopyOutcome:
    """Run `act(say)` in a forked copy of this process; what it says comes back, as far as it can be pickled.

    A copy that says nothing for `silence_s` seconds is ended, and so is everything that it started, whichever
    way this ends; when this process is killed, they end too.

    >>> fork(lambda say: say(6 * 7), silence_s=20).said
    [42]
    """
    here, there = multiprocessing.Pipe(duplex=False)
    lifeline, held = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder:
        ends = (here, there, lifeline, held)
        child = multiprocessing.get_context("fork").Process(target=_live, args=(act, ends, silence_s, folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of every fork in a process with threads
            child.start()
        try:
            there.close()
            os.close(lifeline)
            return _listen(here, child, silence_s)
        finally:
            for end in (os.killpg, os.kill):  # the group is not there yet in its first moment
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(child.pid, signal.SIGKILL)
            child.join()
            child.close()
            here.close()
            os.close(held)


def value_of_fork(work: Callable[[], object], patience_s: float):
    """What `work()` returns in a copy; PerflabError with the reason if it raises, dies, or takes too long."""
    outcome = fork(lambda say: say(work()), patience_s)
    if outcome.ended:
        raise PerflabError(f"no answer within {patience_s:g} s" if outcome.ended == "silent" else outcome.ended)
    return outcome.said[0]


def _listen(here, child, silence_s: float) -> CopyOutcome:
    outcome, last = CopyOutcome(), time.monotonic()
    while True:
        gone = child.exitcode is not None  # asked first: what it said before is still to be read
        try:
            while here.poll(0 if gone else POLL_S):
                kind, what = here.recv()
                if kind == "end":
                    outcome.ended = what
                    return outcome
                if kind == "where":
                    outcome.where = what
                    continue
                outcome.said.append(what)
                last = time.monotonic()
        except EOFError:
            child.join(POLL_S)
        if gone:
            code = child.exitcode
            outcome.ended = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
            return outcome
        if time.monotonic() - last > silence_s:
            outcome.ended = "silent"
            return outcome


def _live(act, ends, silence_s, folder):
    """The copy: in a group of its own, quiet, one thread a pool; nothing of the learner's is ever destroyed in it."""
    here, there, lifeline, held = ends
    here.close()
    os.close(held)
    gc.freeze()  # a loader's iterator that dies here would end the workers of the learner's own loader
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["tempdir"] = folder  # sockets of its workers, removed with it
    _forget_servers()
    os.setpgid(0, 0)
    pin_threads()
    heard = [time.monotonic()]
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    threading.Thread(target=_watch, args=(heard, 0.8 * silence_s, there), daemon=True).start()

    def say(what=None):
        heard[0] = time.monotonic()
        there.send(("said", what))

    try:
        act(say)
        there.send(("end", ""))
    except BaseException as error:
        there.send(("end", first_line(error)))
    signal.pause()  # ended from outside, so that nothing is torn down here


def _watch(heard: list[float], silence_s: float, there):
    """Tells where the main thread of a copy stands, once nothing was said for so long."""
    while (left := heard[0] + silence_s - time.monotonic()) > 0:
        time.sleep(left)
    for frame in frames(sys._current_frames()[threading.main_thread().ident]):
        code = frame.f_code
        if code is _live.__code__:  # what called for the copy is not what hangs
            return
        if is_own(code.co_filename):
            there.send(("where", f"{os.path.basename(code.co_filename)}, line {frame.f_lineno}, in {code.co_name}"))
            return


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


class CountedThreads:
    """Stands in for torch.set_num_threads: keeps the number asked for in `asked`, and starts no thread.

    A forked copy of a process whose OpenMP pool has run hangs in its first parallel region of several threads.
    """

    asked = 0

    def __call__(self, n: int):
        self.asked = max(self.asked, int(n))


def pin_threads():
    """One thread for torch in this process from here on; `torch.set_num_threads.asked` notes who asks for more."""
    if not isinstance(torch.set_num_threads, CountedThreads):
        torch.set_num_threads(1)
        torch.set_num_threads = CountedThreads()
    torch.set_num_threads.asked = 0
