"""The roofs of a device, and what makers print: the peaks of data/gpus.toml with their sources. Measures nothing."""

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perflab import paths

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
HERE = "this machine"


@dataclass(frozen=True)
class Roofs:
    """What one device reaches: bytes/s of a copy (read + written), FLOP/s of products by format.

    `cache_bytes` is its last cache, None where it is not known.
    """

    name: str
    bytes_per_s: float
    peaks: Mapping[str, float]
    cache_bytes: float | None = None

    @property
    def measured_here(self) -> bool:
        return self.name == HERE

    def ridge(self, dtype: str) -> float:
        """FLOP per byte at which both roofs meet (Williams, Waterman and Patterson 2009, DOI
        10.1145/1498765.1498785); nan for a format without a roof."""
        return self.peaks.get(dtype, math.nan) / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Gpu(Roofs):
    """One card as its maker describes it, with dense peaks: `names` are the driver's, `source` is the document."""

    names: tuple[str, ...]
    source: str


@functools.cache
def known() -> dict[str, Gpu]:
    """The cards of data/gpus.toml by name."""
    cards = tomllib.loads((paths.DATA / "gpus.toml").read_text(encoding="utf8"))["gpu"]
    return {
        card["name"]: Gpu(
            name=card["name"],
            bytes_per_s=card["bandwidth"] * 1e9,
            peaks={dtype: x * 1e12 for dtype, x in card["peak"].items()},
            cache_bytes=card["l2"] * 2.0**20 if "l2" in card else None,
            names=tuple(card["names"]),
            source=card["source"],
        )
        for card in cards
    }


def _plain(name: str) -> str:
    return " ".join(name.lower().removeprefix("nvidia ").split())


def find(driver_name: str) -> Gpu | None:
    """The card that the driver calls `driver_name` ("NVIDIA H200"), whole: a laptop's or a slice's is another."""
    return next((card for card in known().values() if _plain(driver_name) in map(_plain, card.names)), None)


@dataclass(frozen=True)
class Sheet:
    """What is printed about the GPU of a machine, if anything; `sentence` says where that comes from, or why not."""

    gpu: Gpu | None
    sentence: str


def sheet(names: Sequence[str]) -> Sheet:
    """The datasheet of the first GPU among `names`, which may be `result.machine["gpus"]`.

    Without a GPU, or with one that is not in data/gpus.toml, there is no sheet and the sentence says so: the course
    goes on with measured roofs.
    """
    if not names:
        return Sheet(None, "There is no GPU here, and no document that gives the peaks of this processor as used here.")
    if (card := find(names[0])) is None:
        return Sheet(None, f"{names[0]} is not in data/gpus.toml: only what is measured is shown.")
    return Sheet(card, f"Printed for {names[0]}: {card.source}.")
