"""What is examined, and what reading it in one process showed: the words between the readings and the rules."""

from dataclasses import dataclass, field

from torch.utils.data import DataLoader, IterableDataset

from .digest import SOURCES
from .probe import Parts, Read


@dataclass
class Case:
    """What is examined: a loader, the number of workers to try it with, and the time that may be taken."""

    loader: DataLoader
    parts: Parts
    workers: int
    method: str
    start: str  # how workers are started here
    epochs: int
    timeout_s: float
    partial_s: float  # reading time where not all can be read
    whole_s: float  # reading time where all can

    @property
    def streams(self) -> bool:
        return isinstance(self.loader.dataset, IterableDataset)


@dataclass
class Alone:
    """What reading in one process without workers showed."""

    keys: list = field(default_factory=list)
    total: int = 0  # samples of the dataset, read or not
    epoch: dict = field(default_factory=dict)
    seen: Read | None = None
    stream: dict = field(default_factory=dict)
    sources: tuple[str, ...] = SOURCES
    facts: dict = field(default_factory=dict)

    @property
    def own_random(self) -> bool:
        return self.facts.get("own_random", False)

    @property
    def item_s(self) -> float:
        return self.seen.seconds / max(1, self.seen.done)
