"""What is kept: the logbook of this learner and the recorded machines, read the same way.

One JSON file per entry, written under another name and renamed: any number of processes may write, a
killed one leaves no half entry, and nothing needs a lock. Plain JSON only; nothing is ever unpickled.
"""

import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from perflab import paths
from perflab.errors import PerflabError

from .files import put
from .result import SCHEMA, Result

_number = itertools.count()
_told: set[str] = set()
FIELDS = {  # what an entry of each kind must have
    "results": ("study", "version", "fixed", "digest", "stopped"),
    "predictions": ("guess",),
    "reveals": ("guess", "truth"),
    "verdicts": ("claim", "state"),
}


def once(sentence: str):
    """Say a sentence to stderr, once in a process."""
    if sentence not in _told:
        _told.add(sentence)
        print(f"perflab: {sentence}", file=sys.stderr)


def write(path: Path, data: dict):
    """Write one entry, whole or not at all. Raises OSError."""
    put(path, (json.dumps({"schema": SCHEMA} | data, separators=(",", ":")) + "\n").encode())


def _entry(path: Path, kind: str) -> dict:
    """One entry of `kind`. Raises PerflabError where it is cut short, unreadable, or of a newer version."""
    try:
        data = json.loads(path.read_text(encoding="utf8"))
        schema = int(data["schema"])
    except OSError as e:
        raise PerflabError(f"{path} cannot be read ({e.strerror}).") from None
    except (ValueError, KeyError, TypeError):
        raise PerflabError(f"{path} is cut short or no entry of this course: delete it to go on.") from None
    if schema > SCHEMA:
        raise PerflabError(f"{path} was written by a newer perflab: update the course, or delete the file.")
    if lacks := [key for key in FIELDS[kind] if key not in data]:
        raise PerflabError(f"{path} is no entry of this course (it lacks {', '.join(lacks)}): delete it to go on.")
    return data


# -- the logbook


def append(kind: str, name: str, data: dict) -> Path | None:
    """Keep one entry of `kind` (results, predictions, verdicts, answers) in the learner's logbook.

    Where nothing can be written (read-only home, full disk) one sentence says so and None comes back:
    the measurement itself goes on.
    """
    stamp = f"{time.time_ns()}-{os.getpid()}-{next(_number)}"
    path = paths.home() / kind / f"{_file_name(name)}.{stamp}.json"
    try:
        write(path, {"name": name} | data)
    except OSError as e:
        once(
            f"Results are not kept: {paths.home()} cannot be written ({e.strerror}). "
            "Set PERFLAB_HOME to a folder with room that you may write."
        )
        return None
    return path


def entries(kind: str, name: str | None = None) -> Iterator[dict]:
    """The logbook's entries of `kind` (of one `name`), oldest first; damaged ones are named and left out."""
    pattern = f"{_file_name(name)}.*.json" if name else "*.json"
    for path in sorted((paths.home() / kind).glob(pattern), key=lambda p: p.name.rsplit(".", 2)[1:]):
        try:
            entry = _entry(path, kind)
        except PerflabError as problem:
            once(str(problem))
            continue
        if name is None or entry.get("name") == name:  # a file's name alone may stand for several
            yield entry


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.=,+-]+", "-", name)


# -- recorded machines


def recorded_folder() -> Path:
    return Path(os.environ.get("PERFLAB_RECORDED") or paths.RECORDED)


def machines() -> list[str]:
    """The machines with recorded results, by name."""
    with contextlib.suppress(OSError):
        return sorted(p.name for p in recorded_folder().iterdir() if p.is_dir())
    return []


def replayed_machine() -> str | None:
    """The machine that `$PERFLAB_MACHINE` asks to replay. Raises PerflabError if it was never recorded."""
    name = os.environ.get("PERFLAB_MACHINE")
    if name and name not in machines():
        known = ", ".join(machines()) or "none yet"
        raise PerflabError(f"PERFLAB_MACHINE={name}: nothing is recorded for it. Recorded: {known}.")
    return name or None


def file_of(study: str, fixed: dict) -> str:
    """The file name of a recorded result: the study, and the fixed labels that tell variants apart."""
    labels = ",".join(f"{k}={v}" for k, v in sorted(fixed.items()))
    return _file_name(f"{study}--{labels}" if labels else study) + ".json"


def recorded(machine: str, study: str, version: int, fixed: dict) -> Result | None:
    """A machine's recorded result by study, version and fixed labels, or None.

    Raises PerflabError where the study is there under other labels: that is a slip in the call.
    """
    others = []
    for path in sorted((recorded_folder() / machine).glob(f"{_file_name(study)}*.json")):
        data = _entry(path, "results")
        try:
            found = Result.from_json(data, source=machine)
        except TypeError:
            raise PerflabError(f"{path} is no result of this course: take it back from git, or delete it.") from None
        if found.study == study and found.version == version and found.fixed == fixed:
            return found
        if found.study == study:
            others.append(f"version {found.version} with {_plain_text(found.fixed)}")
    if others:
        raise PerflabError(
            f"{study} is recorded on {machine} as {' and as '.join(others)}, but version {version} with "
            f"{_plain_text(fixed)} was asked for: use the recorded labels, or record this study again."
        )
    return None


def beside(result: Result) -> list[Result]:
    """The recorded results of the same study, other than `result` itself, to be shown beside it."""
    found = []
    for machine in machines():
        if machine != result.source:
            with contextlib.suppress(PerflabError):  # other labels: not the same study
                found.append(recorded(machine, result.study, result.version, result.fixed))
    return [r for r in found if r is not None]


def _plain_text(fixed: dict) -> str:
    return ", ".join(f"{k} = {v}" for k, v in fixed.items()) or "no fixed labels"


# -- results


def keep(result: Result):
    """Put a result into the logbook, and into `$PERFLAB_RECORD` while a machine is being recorded."""
    data = result.to_json()
    append("results", result.study, data)
    if (folder := os.environ.get("PERFLAB_RECORD")) and result.stopped != "interrupted":
        try:
            write(Path(folder) / file_of(result.study, result.fixed), data)
        except OSError as e:
            raise PerflabError(f"{folder} cannot be written ({e.strerror}): nothing is recorded.") from None


def resumed(study: str, version: int, fixed: dict, digest: str) -> Result | None:
    """While a machine is being recorded: the finished result of an earlier, interrupted recording."""
    if not os.environ.get("PERFLAB_RECORD"):
        return None
    for data in reversed(list(entries("results", study))):
        same = (data["version"], data["fixed"], data["digest"]) == (version, fixed, digest)
        if same and data["stopped"] != "interrupted":
            result = Result.from_json(data)
            keep(result)
            return result
    return None
