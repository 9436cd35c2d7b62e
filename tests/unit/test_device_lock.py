"""The seat: one holder a device, fair, free when its holder dies."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from perflab import PerflabError
from perflab.bench import device_lock

pytestmark = pytest.mark.timed

HOLDER = """
import os, sys, time
from perflab.bench import device_lock
with device_lock.hold("cpu"):
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    print("held", flush=True)
    time.sleep(30)
"""
TAKER = """
import json, sys, time
from perflab.bench import device_lock
for _ in range(int(sys.argv[1])):
    with device_lock.hold("cpu"):
        began = time.monotonic()
        time.sleep(0.01)
        print(json.dumps([began, time.monotonic()]), flush=True)
"""


@pytest.fixture
def holder():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)


def test_no_two_holders_overlap_and_none_starves():
    takers = [
        subprocess.Popen([sys.executable, "-c", TAKER, "25"], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    spans = [[json.loads(line) for line in p.communicate()[0].splitlines()] for p in takers]
    held = sorted(span for of_one in spans for span in of_one)
    assert len(held) == 75
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(held))
    ends = sorted(of_one[-1][1] for of_one in spans)
    starts = [of_one[0][0] for of_one in spans]
    assert max(starts) < ends[0]  # nobody had to wait for another one's last round


def test_a_killed_holder_frees_the_seat_though_its_forked_children_live(holder):
    os.kill(holder.pid, signal.SIGKILL)
    killed = time.monotonic()
    with device_lock.hold("cpu", timeout_s=5):
        assert time.monotonic() - killed < 1


def test_who_waits_too_long_hears_who_holds_it(holder):
    with pytest.raises(PerflabError, match=f"held by process {holder.pid}"), device_lock.hold("cpu", timeout_s=0.1):
        pass


def test_a_holder_and_its_own_subprocess_go_straight_in():
    with device_lock.hold("cpu"), device_lock.hold("cpu", timeout_s=0.1):
        done = subprocess.run([sys.executable, "-c", TAKER, "1"], timeout=60, capture_output=True, check=True)
    assert done.stdout and "PERFLAB_SEAT_HELD" not in os.environ


def test_a_wait_can_be_stopped(holder):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), device_lock.hold("cpu", stop):
        pass


@pytest.mark.parametrize(("name", "value"), [("PERFLAB_SEATS", __file__), ("PERFLAB_SEAT_TIMEOUT", "soon")])
def test_a_wrong_setting_is_one_sentence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(PerflabError, match=name), device_lock.hold("cpu"):
        pass


def test_every_user_of_the_host_may_take_part(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_SEATS", str(tmp_path / "shared" / "seats"))
    before = os.umask(0o077)
    try:
        with device_lock.hold("cpu"):
            modes = {p.name: p.stat().st_mode & 0o777 for p in device_lock.folder().iterdir()}
    finally:
        os.umask(before)
    assert device_lock.folder().stat().st_mode & 0o7777 == 0o1777
    assert modes["cpu.lock"] == modes["cpu.json"] == 0o666
