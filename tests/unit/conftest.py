"""Each test has a home, a folder of seats and a quick budget of its own."""

import contextlib
import subprocess
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERFLAB_SEATS", str(tmp_path / "seats"))
    monkeypatch.setenv("PERFLAB_PROGRESS", "off")
    for name in ("PERFLAB_MACHINE", "PERFLAB_RECORD", "PERFLAB_RECORDED", "PERFLAB_BUDGET", "PERFLAB_IMAGES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def each_device(request):
    """The test on the processor, and on the GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param


@pytest.fixture
def one_thread():
    """For operators on little data: two threads would wait for each other wherever a core is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def busy_neighbours():
    """busy_neighbours(n): a block during which n other processes each keep a core busy."""

    @contextlib.contextmanager
    def start(n):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()

    return start
