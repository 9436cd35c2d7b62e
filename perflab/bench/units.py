"""Numbers with units, written and read one way everywhere."""

import math
import re

from perflab.errors import PerflabError

_STEPS = {
    "s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")],
    "bytes": [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
    "flops": [(1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")],
    "flops/s": [(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")],
    "bytes/s": [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")],
}


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends in: `wait_s` -> s, `peak_bytes` -> bytes, `images_per_s` -> images/s."""
    if metric.endswith("_per_s"):
        return metric.removesuffix("_per_s").replace("_", " ") + "/s"
    for ending, unit in (("_s", "s"), ("_bytes", "bytes"), ("_flops", "flops"), ("_percent", "%"), ("_db", "dB")):
        if metric.endswith(ending):
            return unit
    return ""


def digits(x: float, significant: int = 3) -> str:
    """`x` rounded to three significant digits, without an exponent: 0.0123, 4.56, 1,230."""
    if not math.isfinite(x):
        return "unknown" if math.isnan(x) else "unlimited" if x > 0 else "-unlimited"
    if x == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(x)))
    return f"{round(x, places):,.{max(0, places)}f}"


def step_of(x: float, unit: str) -> tuple[float, str]:
    """The factor and the name under which `x` of `unit` reads best: (1e-3, "ms") for 0.012 s."""
    steps = _STEPS.get(unit, [(1.0, unit)])
    return next((step for step in steps if abs(x) >= step[0]), steps[-1])


def as_printed(x: float, unit: str) -> str:
    """A maker's figure with its own digits: 989.5 TFLOP/s, where `quantity` would round."""
    factor, name = step_of(x, unit)
    return f"{x / factor:,.6g} {name}"


def nbytes_of(size: str) -> int:
    """ "64 KiB" as bytes. Raises PerflabError for anything else than a number and KiB, MiB or GiB."""
    match = re.fullmatch(r"(\d+) ([KMG]iB)", str(size))
    if match is None:
        raise PerflabError(f'The size {size!r} is unknown: write it as "64 KiB", "16 MiB" or "1 GiB".')
    return int(match[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]]


def on_axis(x: float) -> str:
    """A power of ten as an axis shows it: "100 G"."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= 0.99 * factor:
            return f"{x / factor:,.0f} {letter}"
    return f"{x:g}"


def quantity(x: float, unit: str) -> str:
    """`x` of `unit` as a reader wants it. Without a unit, whole numbers are counts, and stay whole.

    >>> quantity(0.01234, "s"), quantity(3 * 2**20, "bytes"), quantity(31.25, "images/s"), quantity(2048, "")
    ('12.3 ms', '3.00 MiB', '31.2 images/s', '2,048')
    """
    if not math.isfinite(x):
        return digits(x)
    if not unit and x == round(x):
        return f"{x:,.0f}"
    factor, name = step_of(x, unit)
    return f"{digits(x / factor)} {name}".rstrip()
