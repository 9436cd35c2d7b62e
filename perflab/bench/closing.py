"""How a measurement ends, whichever way it ends: no process, no worker, no memory left behind.

A Ctrl-C in a terminal or in Jupyter signals the whole process group, and Python raises it anywhere:
inside a destructor, where it is swallowed, or inside torch's shutdown of workers, which then leaks them.
So SIGINT raises only while the learner's own code runs. Elsewhere it is remembered, and raised after.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Mapping

import psutil

GRACE_S = 0.4

_open_doors: list["Door"] = []


def _ignore_sigint_in_child():
    if _open_doors:  # a worker that dies of the group's signal takes torch's shutdown down with it
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ignore_sigint_in_child)


class Door:
    """The one way from the schedule to the learner's code: `door.call(f, ...)`. Main thread only.

    After an interrupt, workers that appeared since the door was opened get `GRACE_S` to go by themselves,
    while torch would wait for each of them up to five seconds. Then they are ended: forked copies of this
    process and children of multiprocessing, not its resource tracker, its fork server or compile pools.
    """

    def __init__(self):
        self.active = threading.current_thread() is threading.main_thread()
        self.hit = False
        self._may_raise = False
        self._calling = False
        self._on_child = None

    def __enter__(self):
        self._before = kin()
        self._late = threading.Timer(GRACE_S, _end_workers, [self._before])
        if self.active:
            self._previous = signal.signal(signal.SIGINT, self._received), sys.unraisablehook
            sys.unraisablehook = self._unraisable
            _open_doors.append(self)
        return self

    def __exit__(self, *_):
        if self.hit:
            if self.active:
                self._mute()
            self._late.cancel()
            self._late.join()
            _end_workers(self._before)
        if self.active:
            handler, sys.unraisablehook = self._previous
            if self._on_child is not None:
                signal.signal(signal.SIGCHLD, self._on_child)
            signal.signal(signal.SIGINT, handler)
            _open_doors.remove(self)

    def _received(self, *_):
        self._mute()
        if not self.hit:
            self.hit = True
            self._late.start()
        if self._may_raise:
            self._may_raise = False  # once: what cleans up after it must not be interrupted too
            raise KeyboardInterrupt

    def _mute(self):
        """Put torch's handler aside, which raises that a worker was killed; it may have come only now."""
        if (handler := signal.getsignal(signal.SIGCHLD)) is not signal.SIG_DFL:
            self._on_child = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _unraisable(self, lost):
        """A destructor swallowed the interrupt, and the learner's code goes on: interrupt it again."""
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._previous[1](lost)
        elif self._calling:
            self._may_raise = True
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()

    def check(self):
        """Raise the interrupt that was remembered, if there was one."""
        if self.hit:
            raise KeyboardInterrupt

    def call(self, f, *args):
        self.check()
        self._may_raise = self._calling = True
        try:
            return f(*args)
        finally:
            self._may_raise = self._calling = False
            if self.hit and sys.exc_info()[0] is None:  # swallowed by an except
                raise KeyboardInterrupt


def end_loader_workers(loader) -> None:
    """End the workers that a DataLoader keeps, or those of its iterator; the loader itself stays usable."""
    iterator = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None
    elif hasattr(loader, "_shutdown_workers"):
        loader._shutdown_workers()


def close(x) -> None:
    """End what a prepared value holds: DataLoader workers, anything with close(), members of containers."""
    if isinstance(x, type | types.ModuleType):
        return
    if isinstance(x, Mapping):
        for member in x.values():
            close(member)
    elif isinstance(x, list | tuple):
        for member in x:
            close(member)
    elif hasattr(x, "_shutdown_workers") or hasattr(x, "_iterator"):
        end_loader_workers(x)
    elif callable(getattr(x, "close", None)):
        x.close()


def release():
    """Let go of what an error or an interrupt still refers to: frames hold iterators and tensors.

    >>> release()
    """
    sys.last_value = sys.last_traceback = sys.last_exc = None
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def kin() -> dict[tuple[int, float], psutil.Process]:
    """The living descendants of this process, by pid and start time."""
    return {(p.pid, p.create_time()): p for p in psutil.Process().children(recursive=True)}


def _end_workers(before):
    mine = psutil.Process().cmdline()
    left = []
    for key, p in kin().items():
        with contextlib.suppress(psutil.Error):
            command = p.cmdline()
            worker = command == mine or any("multiprocessing-fork" in word for word in command)
            of_fork_server = any("multiprocessing.forkserver import main" in word for word in p.parent().cmdline())
            if key not in before and (worker or of_fork_server or not command):
                p.kill()
                left.append(p)
    psutil.wait_procs(left, timeout=0.5)
