"""What needs a CUDA device: device timing, busy time, the split, failures that spoil a process."""

import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perflab import fresh, paths, samples, split, vary
from perflab.bench import conditions, device_lock, machine, timing
from perflab.bench.utilisation import utilisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]


def kernel_of(target_s: float):
    """An elementwise kernel of about this many seconds."""
    a = timing.random_input(2**26, device="cuda")
    whole = statistics.median(timing.device(lambda: torch.sin(a), 20))
    a = timing.random_input(int(2**26 * target_s / whole), device="cuda")
    out = torch.empty_like(a)
    return lambda: torch.sin(a, out=out)


@pytest.mark.parametrize("target_s", [50e-6, 1e-3])
def test_device_time_agrees_with_triton(target_s):
    testing = pytest.importorskip("triton.testing")
    call = kernel_of(target_s)
    pairs = []
    for _ in range(7):
        r = vary("k", {"k": call}, lambda f: f(), study="t.device", clock="device", budget_s=2)
        pairs.append((r["time_s"].of("k").mid, testing.do_bench(call, return_mode="median") / 1e3))
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"\ndevice {target_s:g} s: ours {ours * 1e6:.2f} us, triton {theirs * 1e6:.2f} us")
    assert abs(ours - theirs) < 1.5e-6 + 0.03 * theirs


def test_busy_time_is_the_sum_of_serial_kernels():
    call = kernel_of(1e-3)
    once = statistics.median(timing.device(call, 20, cold=False))

    def gappy():
        for _ in range(5):
            call()
            time.sleep(0.003)

    assert timing.busy(gappy) == pytest.approx(5 * once, rel=0.1)


def test_the_seat_is_the_gpus_own():
    torch.zeros(1, device="cuda")
    assert device_lock.device_name().startswith("cuda-")


def test_conditions_know_the_clock():
    torch.zeros(1, device="cuda")
    seen = conditions.gpu_state()
    assert seen["sm_mhz"] > 0 and seen["neighbours"] >= 0


def test_one_block_reads_as_full_utilisation_and_almost_no_multiprocessor():
    read = utilisation(lambda: torch.cuda._sleep(20_000_000))
    print(f"\none block: {read}")
    assert read["nvml_percent"] > 80
    assert not read["sm_percent"] > 5  # nan before Hopper


def test_an_out_of_memory_is_a_row_and_its_memory_comes_back():
    whole = torch.cuda.get_device_properties(0).total_memory

    def run(share):
        torch.empty(int(share * whole), dtype=torch.uint8, device="cuda").fill_(1)

    free = torch.cuda.mem_get_info()[0]
    r = vary("share", [0.01, 1.2], run, study="t.oom")
    assert "OutOfMemoryError" in r.reasons["1.2"] and r.measured == ["0.01"]
    assert torch.cuda.mem_get_info()[0] > free - 2**30


def test_a_failed_capture_spoils_only_its_own_process():
    def run(kind):
        a = torch.ones(8, device="cuda")
        if kind == "capture":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                (a.sum().item(),)
        return a + 1

    r = vary("kind", ["plain", "capture"], run, study="t.capture", where=fresh(timeout_s=90))
    assert "capture" in r.reasons and "plain" not in r.reasons, r.reasons
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16


def _split(width: int, load_s: float, copies: int, host_s: float):
    net = nn.Linear(width, width).cuda()

    def collate(items):
        time.sleep(load_s)
        return torch.stack([x for (x,) in items])

    data = TensorDataset(torch.randn(copies * 4, width))
    loader = DataLoader(data, batch_size=copies, collate_fn=collate)

    def step(batch):
        x = batch.to("cuda")
        time.sleep(host_s)
        for _ in range(20):
            x = net(x)
        return x

    seen = split(step, loader, budget_s=8)
    print("\n" + str(seen))
    return seen


def test_planted_waiting_is_found_on_the_device_too():
    seen = _split(256, load_s=0.01, copies=16, host_s=0.0)
    assert seen.share("wait").mid > 0.8


def test_a_device_bound_step_is_the_devices():
    seen = _split(8192, load_s=0.0, copies=4096, host_s=0.0)
    assert seen.share("device").mid > seen.share("host").mid


def test_a_host_bound_step_is_the_hosts():
    seen = _split(256, load_s=0.0, copies=16, host_s=0.005)
    assert seen.share("host").mid > 0.8


def test_large_pageable_batches_show_as_copies():
    batches = [torch.randn(16384, 1024) for _ in range(4)]
    seen = split(lambda batch: batch.to("cuda").mul_(2), batches, budget_s=8)
    print("\n" + str(seen))
    assert seen.share("copy").mid > 0.6


def test_queued_work_hides_the_wait():
    """While the device has work queued, a slow loader costs nothing; a clock around next() would blame it."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step(batch):
        for _ in range(20):
            a @ a

    def slow():
        for k in range(1000):
            time.sleep(0.008)
            yield k

    seen = split(step, slow_loader(slow), budget_s=8)
    print("\n" + str(seen))
    assert seen.share("wait").mid < 0.15


def slow_loader(make):
    class Loader:
        def __iter__(self):
            return make()

    return Loader()


def test_an_interrupt_frees_the_gpu(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import random, time, torch\n"
        "from perflab import vary\n"
        "def run(a): a @ a; time.sleep(random.random() / 3)\n"
        "def prepare(n): return torch.randn(n, n, device='cuda')\n"
        "if __name__ == '__main__':\n"
        "    print('go', flush=True)\n"
        "    vary('n', [16384, 20480], run, prepare=prepare, study='t.int', budget_s=60)\n"
    )
    path = os.pathsep.join([str(paths.COURSE), os.environ.get("PYTHONPATH", "")])
    p = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    assert p.stdout.readline() == "go\n"
    time.sleep(8)
    os.kill(p.pid, signal.SIGINT)
    out, _ = p.communicate(timeout=20)
    assert "t.int: n" in out and p.returncode != 0


def test_zeros_are_not_what_is_timed():
    assert timing.random_input(1000, device="cuda").std().item() == pytest.approx(1, abs=0.2)


def test_a_needs_of_cuda_is_measured_here():
    r = vary(
        "n",
        [256, 512],
        lambda a: a @ a,
        prepare=lambda n: torch.randn(n, n, device="cuda"),
        study="t.here",
        needs=("cuda",),
    )
    assert r.source == "here" and r.settings["clock"] == "wall" and "sm_mhz" in r.conditions


def test_own_clocks_travel_from_a_fresh_process():
    def run(n):
        a = torch.randn(n, n, device="cuda")
        return samples(device_s=statistics.median(timing.device(lambda: a @ a, 5)))

    r = vary("n", [512, 1024], run, study="t.fresh", where=fresh(timeout_s=90))
    assert r["device_s"].of(1024).mid > 0
