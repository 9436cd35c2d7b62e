"""How busy the GPU is: by NVML's utilisation, and by the share of multiprocessors at work (GPM)."""

import statistics
import threading
import time
from collections.abc import Callable

from . import machine
from .timing import Samples, samples, synchronize

SETTLE_S, WINDOW_S = 0.4, 0.8  # NVML averages over up to a second: the first readings are of the past


def utilisation(work: Callable[[], object]) -> Samples:
    """Repeat `work` for about a second and read what the driver says of it meanwhile.

    nvml_percent: NVML's utilisation.gpu, the share of time in which any kernel ran. sm_percent: the share
    of multiprocessors at work, by GPM (Hopper and newer; else nan). Needs CUDA.
    """
    with machine.nvml() as nv:
        handle = machine.nvml_handle(nv)
        readings, done = [], threading.Event()

        def read():
            while not done.wait(0.05):
                readings.append((time.monotonic(), nv.nvmlDeviceGetUtilizationRates(handle).gpu))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            _repeat(work, SETTLE_S)
            began, first = time.monotonic(), _gpm_sample(nv, handle)
            _repeat(work, WINDOW_S)
            busy = _gpm_percent(nv, first, _gpm_sample(nv, handle))
        finally:
            done.set()
            reader.join()
        return samples(nvml_percent=statistics.fmean(u for at, u in readings if at >= began), sm_percent=busy)


def _repeat(work: Callable[[], object], seconds: float):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()
        synchronize()


def _gpm_sample(nv, handle):
    try:
        support = nv.nvmlGpmQueryDeviceSupport(handle)
        if not support.isSupportedDevice:
            return None
        sample = nv.nvmlGpmSampleAlloc()
        nv.nvmlGpmSampleGet(handle, sample)
        return sample
    except nv.NVMLError:
        return None


def _gpm_percent(nv, first, second) -> float:
    """SM utilisation between two GPM samples, in percent; nan without GPM."""
    if first is None or second is None:
        return float("nan")
    asked = nv.c_nvmlGpmMetricsGet_t()
    asked.version = nv.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = 1
    asked.sample1, asked.sample2 = first, second
    asked.metrics[0].metricId = nv.NVML_GPM_METRIC_SM_UTIL
    try:
        nv.nvmlGpmMetricsGet(asked)
        return float(asked.metrics[0].value)
    finally:
        nv.nvmlGpmSampleFree(first)
        nv.nvmlGpmSampleFree(second)
