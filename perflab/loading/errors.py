"""Why a DataLoader's worker died, from what the loop was told: the cause and the way out, in one sentence."""

import functools
import tomllib
import traceback

from perflab import paths


def explain(what: str | BaseException) -> str:
    """The cause and the way out for an error of a DataLoader, or its text; empty for one not known here.

    >>> explain("worker (pid 7) is killed by signal: Bus error.")[:48]
    'A worker wrote to memory that is backed by nothi'
    """
    if isinstance(what, BaseException):  # torch says "exited unexpectedly", and the error before it says why
        what = "".join(traceback.format_exception(what, limit=0))
    return next((sentence for words, sentence in _causes() if all(w in what.lower() for w in words)), "")


@functools.cache
def _causes() -> list[tuple[list[str], str]]:
    """The words of a message, all of which must occur, and the sentence; the first match is given."""
    data = tomllib.loads((paths.DATA / "errors.toml").read_text(encoding="utf8"))
    return [(entry["words"], entry["sentence"].format(less=data["less"])) for entry in data["errors"]]
