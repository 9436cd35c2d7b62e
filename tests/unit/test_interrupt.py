"""Ctrl-C during a sweep over DataLoaders: at random moments, to the process or to its group."""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from perflab.bench import record

pytestmark = pytest.mark.timed

SWEEP = """
import json, signal, sys, time, warnings
import torch
from torch.utils.data import DataLoader
from perflab import vary
from perflab_test_data import Slow

warnings.simplefilter("ignore")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" may have left it ignored
method, persistent = sys.argv[1], sys.argv[2] == "True"


def load(loader):
    for _ in loader:
        pass


def workers(n):
    return DataLoader(Slow(), 4, num_workers=n, persistent_workers=persistent, multiprocessing_context=method)


if __name__ == "__main__":
    load(workers(1))
    for line in sys.stdin:
        print("go", flush=True)
        stopped = ""
        try:
            vary("workers", [1, 2, 4], load, prepare=workers, study="t.interrupt", budget_s=60)
        except KeyboardInterrupt:
            stopped = "interrupted"
        print(json.dumps({"stopped": stopped, "at": time.time()}), flush=True)
"""
DATA = """
import random
import time
import torch


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(random.choice([0, 0.006]))  # uneven, so that no interval is narrow too soon
        return torch.full((1000, 100), i)  # a batch of them goes through /dev/shm
"""


def _session(sid: int) -> list[psutil.Process]:
    found = []
    for p in psutil.process_iter():
        try:
            if os.getsid(p.pid) == sid and p.pid != sid and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
        except (ProcessLookupError, psutil.Error):
            pass
    return found


def _workers(sid: int, server: set[int]) -> list[psutil.Process]:
    """The session's processes without multiprocessing's resource tracker and fork server."""
    return [p for p in _session(sid) if p.pid not in server]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_interrupt_leaves_nothing_and_loses_nothing(method, persistent, to_group, tmp_path):
    """The whole bar, 20 moments each, with PERFLAB_TRIALS=20."""
    trials = int(os.environ.get("PERFLAB_TRIALS", "2"))
    (tmp_path / "perflab_test_data.py").write_text(DATA)
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    shm = set(os.listdir("/dev/shm"))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, str(script), method, str(persistent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    lines = _reader(child)
    rng = random.Random(f"{method}{persistent}{to_group}")
    try:
        server: set[int] = set()
        for trial in range(trials):
            child.stdin.write("go\n")
            child.stdin.flush()
            assert lines.get(timeout=60) == "go"
            if not trial:
                server = {p.pid for p in _session(child.pid)}
            time.sleep(rng.uniform(0, 0.3) if trial % 2 else rng.uniform(0, 2.0))
            sent = time.time()
            (os.killpg if to_group else os.kill)(child.pid, signal.SIGINT)
            answer = _answer(lines)
            assert answer["stopped"] == "interrupted"
            assert answer["at"] - sent < (1.0 if len(os.sched_getaffinity(0)) > 2 else 2.0)
            time.sleep(0.2)
            assert _workers(child.pid, server) == []
            assert set(os.listdir("/dev/shm")) - shm <= {n for n in os.listdir("/dev/shm") if n.startswith("sem.")}
        kept = list(record.entries("results", "t.interrupt"))
        assert len(kept) == trials and all(e["stopped"] == "interrupted" for e in kept)
        child.stdin.close()
        assert child.wait(20) == 0
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert _session(child.pid) == []
    assert set(os.listdir("/dev/shm")) == shm


def _reader(child: subprocess.Popen) -> queue.Queue:
    """The child's lines, read by a thread: a line may be whole in a buffer that select cannot see."""
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line.strip()) for line in child.stdout], daemon=True).start()
    return lines


def _answer(lines: queue.Queue) -> dict:
    """The JSON line; what was measured is printed before it."""
    while not (line := lines.get(timeout=15)).startswith("{"):
        pass
    return json.loads(line)
