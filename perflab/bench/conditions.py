"""What else went on while we measured: foreign load, clocks, throttling, neighbours on the GPU."""

import contextlib
import statistics
import time

import psutil

from . import machine

CROWDED = 0.3  # share of the usable cores that others may take before absolute figures are doubtful


def tree_cpu_s(process: psutil.Process | None = None) -> float:
    """CPU seconds spent so far by this process, its living descendants, and those that it has reaped."""
    root = process or psutil.Process()
    spent = 0.0
    for p in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            t = p.cpu_times()
            spent += t.user + t.system + t.children_user + t.children_system
    return spent


def busy_cpu_s() -> float:
    """CPU seconds spent so far by everyone on the CPUs that this process may use."""
    every = psutil.cpu_times(percpu=True)
    return sum(sum(every[i]) - every[i].idle - getattr(every[i], "iowait", 0.0) for i in machine.affinity())


class Watch:
    """Notes the conditions of each round: `start()`, the round, `stop()`; `summary()` at the end."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.rounds: list[dict] = []

    def start(self):
        self._began = time.perf_counter(), busy_cpu_s(), tree_cpu_s()

    def stop(self):
        began, busy, own = self._began
        seconds = max(time.perf_counter() - began, 1e-9)
        mine = (tree_cpu_s() - own) / seconds
        foreign = max(0.0, (busy_cpu_s() - busy) / seconds - mine)
        note = {"own_cores": mine, "foreign_cores": foreign, "seconds": seconds}
        self.rounds.append(note | (gpu_state() if self.on_gpu else {}))

    def summary(self) -> dict:
        """Mean cores taken by us and by others, the median clock, the worst of neighbours and throttling."""
        if not self.rounds:
            return {}
        total = sum(r["seconds"] for r in self.rounds)
        seen = {
            key: round(sum(r[key] * r["seconds"] for r in self.rounds) / total, 2)
            for key in ("own_cores", "foreign_cores")
        }
        on_gpu = [r for r in self.rounds if "sm_mhz" in r]
        if on_gpu:
            seen["sm_mhz"] = statistics.median_low(r["sm_mhz"] for r in on_gpu)
            seen["neighbours"] = max(r["neighbours"] for r in on_gpu)
            seen["throttled"] = sorted({why for r in on_gpu for why in r["throttled"]})
        return seen


_THROTTLES = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "power brake",
}


def gpu_state() -> dict:
    """SM clock in MHz, reasons for throttling, and other processes on the current CUDA device."""
    with machine.nvml() as nv:
        if nv is None:
            return {}
        handle = machine.nvml_handle(nv)
        try:
            clock = nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)
            bits = nv.nvmlDeviceGetCurrentClocksEventReasons(handle)
            running = nv.nvmlDeviceGetComputeRunningProcesses(handle)
        except nv.NVMLError:  # not offered by this board or in this container
            return {}
        reasons = {
            word for name, word in _THROTTLES.items() if bits & getattr(nv, f"nvmlClocksThrottleReason{name}", 0)
        }
        # One of them is this process. Its pid is no help: a container sees other numbers.
        return {"sm_mhz": clock, "throttled": sorted(reasons), "neighbours": max(0, len(running) - 1)}
