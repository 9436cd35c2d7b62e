"""What the machine may use: affinity, control groups of both versions, needs, names."""

import math
import os
import subprocess
import sys
import time

import pytest

from perflab.bench import conditions, machine


def _tree(folder, files: dict[str, str]):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "own", "cpus"),
    [
        ({"cpu.max": "400000 100000"}, "0::/", 4.0),
        ({"u/a/cpu.max": "max 100000", "u/cpu.max": "150000 100000"}, "1:net_cls:/\n0::/u/a", 1.5),
        ({"cpu.max": ""}, "0::/", math.inf),
        ({}, "0::/gone", math.inf),
        ({"cpu/d/x/cpu.cfs_quota_us": "200000", "cpu/d/x/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/d/x", 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", math.inf),
    ],
)
def test_the_quota_is_that_of_the_own_group_and_its_parents(tmp_path, files, own, cpus):
    assert machine.cgroup_cpus(_tree(tmp_path, files), own) == cpus


def test_cores_follow_the_affinity_mask():
    every = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(every)})
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, every)


def test_a_need_says_why_it_is_unmet():
    assert machine.missing("numpy") is None
    assert machine.missing("nosuchpackage") == "the package nosuchpackage is not installed here"
    if not machine.cuda_devices():
        assert machine.missing("cuda") == "no CUDA device here"
        assert "2 CUDA devices are needed" in machine.missing("2 cuda")


def test_the_fingerprint_names_no_host_user_or_path():
    text = str(machine.facts())
    assert os.uname().nodename not in text and os.path.expanduser("~") not in text
    assert machine.slug() == machine.slug().lower() and " " not in machine.slug()


def test_the_description_is_for_people():
    assert "cores usable" in machine.describe() and "cuda" in machine.describe()


def test_own_load_counts_children_too():
    watch = conditions.Watch(on_gpu=False)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            time.sleep(0.3)
            watch.start()
            time.sleep(1.0)
            watch.stop()
        finally:
            child.kill()
    assert 0.2 < watch.summary()["own_cores"] < 1.3


def test_a_compiler_needs_its_program_and_pythons_headers(tmp_path, monkeypatch):
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "python3-dev" in machine.missing("compiler")
    (tmp_path / "Python.h").touch()
    assert machine.missing("compiler") is None
    (tmp_path / "g++").unlink()
    assert "apt-get install g++" in machine.missing("compiler")
