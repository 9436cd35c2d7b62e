"""The profiler, the lines that wait and the peak of memory on a CUDA device, each against another account of it."""

import gc
import inspect
import itertools

import pytest
import torch
from torch import nn

from perflab import PerflabError
from perflab.bench import machine, timing
from perflab.launch import waits
from perflab.memory import peak
from perflab.trace import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


def products(n=10, width=4096):
    a = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)

    def step():
        for _ in range(n):
            torch.relu(a @ a)

    return step


# -- the profiler


def test_the_trace_holds_the_kernels_of_the_steps_and_their_busy_time():
    step = products()
    seen = profile.profiled(step, steps=4)
    other = timing.busy(step)
    print(f"\n{seen}\n{seen.trace!r} busy {seen.trace.busy_ns / 4e9:.6f} s a step, by torch's events {other:.6f} s")
    assert seen.recorded == 4
    assert not seen.trace.is_early.any() and seen.trace.dropped_kernels < 4
    assert seen.trace.launches == 4 * 20
    assert seen.trace.busy_ns / 4e9 == pytest.approx(other, rel=0.1)


def test_large_kernels_are_hardly_slowed_and_tiny_ones_are():
    x = torch.ones(8, device="cuda")

    def tiny():
        for _ in range(500):
            x + 1.0

    large, small = profile.profiled(products()), profile.profiled(tiny)
    print(f"\nlarge {large}\ntiny {small}")
    assert large.distortion < 1.15 < small.distortion
    assert "not gaps" in small.warning


def test_the_table_is_sorted_by_the_devices_own_time():
    rows = profile.profiled(products()).table(20)
    assert list(rows["self_device_s"]) == sorted(rows["self_device_s"], reverse=True)
    assert rows["operator"].iloc[0] == "aten::mm" and rows["share"].iloc[0] > 0.5


def test_a_step_that_uses_no_device_has_no_kernels_and_says_so():
    a = torch.randn(64, 64)
    seen = profile.profiled(lambda: a @ a)
    with pytest.raises(PerflabError, match="0 kernels recorded"):
        seen.trace  # noqa: B018


# -- the lines that wait


def several(x):
    x.sum().item()
    x[x > 0]
    x.cpu()
    torch.cuda.synchronize()
    print(x[0, 0])
    torch.tensor([1.0, 2.0], device="cuda")
    x.nonzero()


def test_each_wait_is_found_and_what_no_operator_tells_by_torchs_own_witness(capsys):
    lines, first = inspect.getsourcelines(several)
    before = torch.cuda.get_sync_debug_mode()
    found = waits.host_syncs(lambda: several(torch.randn(8, 8, device="cuda")))
    assert torch.cuda.get_sync_debug_mode() == before
    with capsys.disabled():
        print("", *found, sep="\n")
    assert {s.place.line for s in found} == {first + k for k in range(1, len(lines))}


@pytest.mark.parametrize(("pinned", "late", "expected"), [(False, False, 1), (True, False, 1), (True, True, 0)])
def test_a_copy_to_the_device_waits_unless_it_is_pinned_and_asked_not_to(pinned, late, expected):
    x = torch.randn(1024, 1024)
    x = x.pin_memory() if pinned else x
    assert len(waits.host_syncs(lambda: x.to("cuda", non_blocking=late))) == expected


# -- the peak


def training(large, width=1024):
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = itertools.cycle([8192 if k == large else 256 for k in range(1, 5)])

    def step():
        x = torch.randn(next(sizes), width, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("at", [2, 4])
def test_the_step_and_phase_and_the_bytes_are_the_allocators(at):
    step = training(at)
    for _ in range(4):
        step()  # libraries' workspaces are there now
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step()
    theirs = torch.cuda.max_memory_allocated()
    found = peak.peak_step(step, 4)
    print(f"\n{found}\n{found.table()}")
    assert (found.step, found.phase, found.counted) == (at, "backward", "allocator")
    assert found.bytes == pytest.approx(theirs, rel=1e-3)
    assert sum(a.bytes for a in found.alive) == pytest.approx(found.bytes, rel=0.02)
    forward = next(a for a in found.alive if a.phase == "forward" and a.code.startswith("loss = model("))
    assert forward.line == line_of(training, "loss = model(") and forward.bytes >= 4 * 8192 * 1024 * 4


def test_the_allocators_history_is_off_afterwards():
    peak.peak_step(training(1), 1)
    before = sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))
    torch.zeros(1 << 22, device="cuda")
    assert sum(map(len, torch.cuda.memory._snapshot()["device_traces"])) == before


def test_tensors_counted_on_the_device_agree_with_its_allocator():
    """The allocator rounds, and its workspaces are no tensors; what others hold in this process is taken off."""
    gc.collect()
    counted = peak._by_tensors(training(2), 4)
    gc.collect()
    others = torch.cuda.memory_allocated()
    asked = peak.peak_step(training(2), 4)
    print(f"\ncounted {counted.bytes:,}, allocator {asked.bytes:,} with {others:,} of others")
    assert (counted.step, counted.phase) == (asked.step, asked.phase)
    assert counted.bytes == pytest.approx(asked.bytes - others, rel=0.15)
