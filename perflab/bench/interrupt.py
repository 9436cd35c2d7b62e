"""Ctrl-C that ends a measurement at a safe place, and leaves no worker behind.

A Ctrl-C in a terminal or in Jupyter signals the whole process group, and Python raises it anywhere:
inside a destructor, where it is swallowed, or inside torch's shutdown of workers, which then leaks them.
So SIGINT raises only while the learner's own code runs. Elsewhere it is remembered, and raised after.
"""

import contextlib
import os
import signal
import sys
import threading

import psutil

from .cleanup import descendants

GRACE_S = 0.4
IDLE, IN_CALL, INTERRUPTED = "idle", "in call", "interrupted"

_entered: list["Interruptible"] = []


def _ignore_sigint_in_child():
    if _entered:  # a worker that dies of the group's signal takes torch's shutdown down with it
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ignore_sigint_in_child)


class Interruptible:
    """Runs the learner's code, `interruptible.call(f, ...)`, so that only this code is interrupted. Main thread only.

    Its `state` is IDLE between calls, where SIGINT is remembered (`hit`) and raised by the next call or `check()`;
    IN_CALL while the learner's code runs, where SIGINT raises KeyboardInterrupt; and INTERRUPTED once it did, until
    the call ends: what cleans up after it must not be interrupted too. A destructor that swallowed the exception
    brings the call back from INTERRUPTED to IN_CALL, and it is raised again.

    After an interrupt, workers that appeared since the start get `GRACE_S` to go by themselves,
    while torch would wait for each of them up to five seconds. Then they are ended: forked copies of this
    process and children of multiprocessing, not its resource tracker, its fork server or compile pools.
    """

    def __init__(self):
        self.active = threading.current_thread() is threading.main_thread()
        self.hit = False
        self.state = IDLE
        self._on_child = None

    def __enter__(self):
        self._before = descendants()
        self._late = threading.Timer(GRACE_S, _end_workers, [self._before])
        if self.active:
            self._previous = signal.signal(signal.SIGINT, self._received), sys.unraisablehook
            sys.unraisablehook = self._unraisable
            _entered.append(self)
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
            _entered.remove(self)

    def check(self):
        """Raise the interrupt that was remembered, if there was one."""
        if self.hit:
            raise KeyboardInterrupt

    def call(self, f, *args):
        self.check()
        self.state = IN_CALL
        try:
            return f(*args)
        finally:
            self.state = IDLE
            if self.hit and sys.exc_info()[0] is None:  # swallowed by an except
                raise KeyboardInterrupt

    def _received(self, *_):
        self._mute()
        if not self.hit:
            self.hit = True
            self._late.start()
        if self.state == IN_CALL:
            self.state = INTERRUPTED
            raise KeyboardInterrupt

    def _unraisable(self, lost):
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._previous[1](lost)
        elif self.state != IDLE:  # swallowed by a destructor
            self.state = IN_CALL
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()

    def _mute(self):
        """Put torch's handler aside, which raises that a worker was killed; it may have come only now."""
        if (handler := signal.getsignal(signal.SIGCHLD)) is not signal.SIG_DFL:
            self._on_child = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _end_workers(before: dict):
    mine = psutil.Process().cmdline()
    ended = []
    for key, p in descendants().items():
        with contextlib.suppress(psutil.Error):
            command = p.cmdline()
            worker = command == mine or any("multiprocessing-fork" in word for word in command)
            of_fork_server = any("multiprocessing.forkserver import main" in word for word in p.parent().cmdline())
            if key not in before and (worker or of_fork_server or not command):
                p.kill()
                ended.append(p)
    psutil.wait_procs(ended, timeout=0.5)
