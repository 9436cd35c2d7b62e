"""Schedules in a process of their own: what kills one is a row, the rest is measured."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from perflab import PerflabError, fresh, vary
from perflab.bench import process


@pytest.mark.slow
def test_a_crash_a_hang_and_exhausted_memory_are_rows_with_reasons():
    def run(kind):
        if kind == "crashes":
            ctypes.string_at(0)
        if kind == "hangs":
            time.sleep(1000)
        if kind == "exhausts":
            kept = []
            while True:
                kept.append(b"x" * 50_000_000)
        if kind == "exits":
            os._exit(3)
        time.sleep(0.001)

    kinds = ["fine", "crashes", "hangs", "exhausts", "exits", "also fine"]
    r = vary("kind", kinds, run, study="t.fresh", where=fresh(timeout_s=8, memory_bytes=2 * 2**30))
    assert r.measured == ["fine", "also fine"] and r.values == kinds
    assert "SIGSEGV" in r.reasons["crashes"]
    assert "no answer within 8 s" in r.reasons["hangs"]
    assert "2.00 GiB of memory" in r.reasons["exhausts"]
    assert "status 3" in r.reasons["exits"]
    assert r.ratio("fine", "also fine").n >= 6


def test_an_interrupt_ends_the_child_and_shows_what_it_had(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import time\n"
        "from perflab import PerflabError, fresh, vary\n"
        "def run(ms): time.sleep(ms / 1000)\n"
        "if __name__ == '__main__':\n"
        "    print('go', flush=True)\n"
        "    vary('ms', [200, 400], run, study='t.fresh', where=fresh(), budget_s=60)\n"
    )
    p = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert p.stdout.readline() == "go\n"
        until = time.time() + 60
        while not psutil.Process(p.pid).children() and time.time() < until:
            time.sleep(0.05)
        (child,) = psutil.Process(p.pid).children()
        time.sleep(6)
        os.kill(p.pid, signal.SIGINT)
        out, _ = p.communicate(timeout=10)
        assert "t.fresh: ms" in out and p.returncode != 0
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)


def test_what_cannot_travel_is_one_sentence_and_leaves_no_process():
    lock = threading.Lock()
    with pytest.raises(PerflabError, match="cannot travel"):
        vary("n", [1], lambda n: lock.acquire(False), study="t.fresh", where=fresh())
    assert not [p for p in psutil.Process().children() if "perflab.bench.process" in p.cmdline()]


def _number(n):
    return n + 1


CALLS = [
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
    (lambda: time.sleep(1000), "no answer within 2 s"),
    (lambda: bytearray(2 * 2**30)[::4096] and time.sleep(5), "1.00 GiB of memory"),
    (lambda: os._exit(3), "status 3"),
    (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    (threading.Lock, "TypeError: cannot pickle"),
]


@pytest.mark.parametrize("f, why", CALLS, ids=[why for _, why in CALLS])
def test_a_call_in_a_new_interpreter_that_comes_to_no_end_is_one_sentence(f, why):
    with pytest.raises(PerflabError, match=f"^In a process of its own: .*{why}"):
        process.call(f, timeout_s=2, memory_bytes=2**30)


def test_a_call_in_a_new_interpreter_returns_its_value():
    assert process.call(lambda n: (_number(n), os.getppid()), 2) == (3, os.getpid())


def test_a_killed_parent_takes_its_child_along(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import time\nfrom perflab.bench import process\nprocess.call(time.sleep, 1000)\n")
    parent = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    until = time.time() + 60
    while not psutil.Process(parent.pid).children() and time.time() < until:
        time.sleep(0.05)
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive
