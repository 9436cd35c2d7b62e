"""What makers print about their GPUs: the peaks of data/gpus.toml, each with its source. Nothing is measured here."""

import functools
import html
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perflab import paths
from perflab.bench import machine
from perflab.errors import PerflabError

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Gpu:
    """One card as its maker describes it: dense peaks in FLOP/s by format, bandwidth in bytes/s.

    What the documents do not say is None, or missing from `peaks`. `names` are the driver's.
    """

    name: str
    names: tuple[str, ...]
    capability: str
    bytes_per_s: float
    peaks: Mapping[str, float]
    source: str
    sms: int | None = None
    memory_bytes: float | None = None
    cache_bytes: float | None = None  # L2

    def ridge(self, dtype: str) -> float:
        """FLOP per byte at which both roofs meet; nan for a format without a peak."""
        return self.peaks.get(dtype, math.nan) / self.bytes_per_s


@functools.cache
def known() -> dict[str, Gpu]:
    """The cards of data/gpus.toml by name."""
    return read(paths.DATA / "gpus.toml")


def read(path: Path) -> dict[str, Gpu]:
    """Cards from a TOML file. Raises PerflabError, with the card and the field, for what cannot be right."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf8"))["gpu"]
        if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
            raise ValueError("each card stands under [[gpu]]")
    except (OSError, ValueError, KeyError) as e:
        raise PerflabError(f"{path.name} cannot be read ({e}): take it back from git.") from None
    cards = [_card(path.name, table) for table in tables]
    taken: dict[str, str] = {}
    for card in cards:
        for name in {card.name, *card.names}:
            if taken.setdefault(_plain(name), card.name) != card.name:
                raise PerflabError(f"{path.name}: {name!r} is a name of both {taken[_plain(name)]} and {card.name}.")
    return {card.name: card for card in cards}


def _card(file: str, table: Mapping) -> Gpu:
    name = table.get("name", "a card without a name")

    def wrong(what: str) -> PerflabError:
        return PerflabError(f"{file}, {name}: {what}.")

    needed = {"name", "names", "capability", "bandwidth", "peak", "source"}
    texts = [table.get("name", "x"), table.get("capability", "1.0"), table.get("source", "x")]
    names = table.get("names", ["x"])
    if not isinstance(names, list) or not all(isinstance(x, str) for x in [*texts, *names]):
        raise wrong("name, capability and source are texts, names a list of them")
    if not isinstance(table.get("peak", {"fp32": 1}), Mapping) or table.get("peak") == {}:
        raise wrong("peak is a table of formats, such as { fp32 = 19.5 }")
    if lacks := sorted(needed - set(table)):
        raise wrong(f"{', '.join(lacks)} must be given")
    if strange := sorted(set(table) - needed - {"sms", "memory", "l2"}):
        raise wrong(f"{', '.join(strange)} is no field of a card")
    if strange := sorted(set(table["peak"]) - set(FORMATS)):
        raise wrong(f"the formats are {', '.join(FORMATS)}, and not {', '.join(strange)}")
    figures = {key: table[key] for key in ("bandwidth", "sms", "memory", "l2") if key in table} | table["peak"]
    if bad := [
        key
        for key, x in figures.items()
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < math.inf
    ]:
        raise wrong(f"{', '.join(bad)} must be a number above zero")
    if not re.fullmatch(r"\d+\.\d", table["capability"]) or len(table["source"]) < 10:
        raise wrong('the capability is written as "9.0", and the source names a document')
    return Gpu(
        name,
        tuple(table["names"]),
        table["capability"],
        table["bandwidth"] * 1e9,
        {dtype: x * 1e12 for dtype, x in table["peak"].items()},
        table["source"],
        sms=table.get("sms"),
        memory_bytes=table["memory"] * 1e9 if "memory" in table else None,
        cache_bytes=table["l2"] * 2.0**20 if "l2" in table else None,
    )


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

    def __repr__(self):
        return "What is printed about this machine"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": repr(self), "text/html": f"<p>{html.escape(self.sentence)}</p>"}


def sheet(names: Sequence[str] | None = None) -> Sheet:
    """The datasheet of the first GPU among `names`, by default of this machine's as NVML names them.

    `names` may be `result.machine["gpus"]`. Without a GPU, or with one that is not in data/gpus.toml, there
    is no sheet and the sentence says so: the course goes on with measured roofs.
    """
    if names is None:
        names = [board["name"] for board in machine.gpus()]
    if not names:
        return Sheet(None, "There is no GPU here, and no document that gives the peaks of this processor as used here.")
    if (card := find(names[0])) is None:
        return Sheet(None, f"{names[0]} is not in data/gpus.toml: only what is measured is shown.")
    return Sheet(card, f"Printed for {names[0]}: {card.source}.")
