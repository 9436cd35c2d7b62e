"""A process that is killed by SIGKILL takes all that perflab started for it along: no child outlives it."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

LEFT_S = 10  # seconds in which everything must be gone
MARK = "PERFLAB_TEST_MARK"
SETTING = """
import time
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        time.sleep(0.2)
        return torch.zeros(4)


def epoch(loader):
    for _ in loader:
        pass
"""
PARENTS = {
    "a new process": """
from perflab import fresh, vary
vary("x", [1], lambda x: time.sleep(60), study="t.lifeline", where=fresh(), budget_s=60)
""",
    "a guard's copy": """
from perflab import guards
guards(DataLoader(Slow(), 4, num_workers=2, multiprocessing_context="fork"))
""",
    "workers of a loader": """
from perflab import vary
started = dict(num_workers=2, multiprocessing_context="fork")
vary("x", [1], epoch, prepare=lambda x: DataLoader(Slow(), 4, **started), study="t.lifeline", budget_s=60)
""",
}


def _marked(mark: str) -> list[psutil.Process]:
    """The live processes that carry this mark in their environment."""
    alive = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            pass
    return alive


def _within(seconds: float, happens) -> bool:
    until = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="environments of processes are read from /proc")
@pytest.mark.parametrize("child", PARENTS)
def test_no_process_outlives_a_killed_one(child, tmp_path):
    program, mark = tmp_path / "program.py", uuid.uuid4().hex
    program.write_text(SETTING + PARENTS[child])
    parent = subprocess.Popen([sys.executable, str(program)], env=os.environ | {MARK: mark})
    try:
        assert _within(90, lambda: len(_marked(mark)) > 1), f"{child} was never started"
        time.sleep(1)  # on its way, not only begun
        assert parent.poll() is None
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert _within(LEFT_S, lambda: not _marked(mark)), [p.cmdline() for p in _marked(mark)]
    finally:
        for process in _marked(mark):
            process.kill()
