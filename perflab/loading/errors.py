"""Why a DataLoader's worker died, from what the loop was told: the cause and the way out, in one sentence."""

import functools
import tomllib
from collections.abc import Iterator

from perflab import paths


def explain(what: str | BaseException) -> str:
    """The cause and the way out for an error of a DataLoader, or its text; empty for one not known here.

    >>> explain("worker (pid 7) is killed by signal: Bus error.")[:48]
    'A worker wrote to memory that is backed by nothi'
    """
    text = " ".join(_chain(what)) if isinstance(what, BaseException) else str(what)
    return next((sentence for words, sentence in _causes() if all(w in text.lower() for w in words)), "")


@functools.cache
def _causes() -> list[tuple[list[str], str]]:
    """The words of a message, all of which must occur, and the sentence; the first match is given."""
    data = tomllib.loads((paths.DATA / "errors.toml").read_text(encoding="utf8"))
    return [(entry["words"], entry["sentence"].format(less=data["less"])) for entry in data["errors"]]


def _chain(error: BaseException | None) -> Iterator[str]:
    """An error and those that it was raised from: torch says "exited unexpectedly" and keeps the cause there."""
    seen = set()
    while error is not None and id(error) not in seen:  # a chain may close on itself
        seen.add(id(error))
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
