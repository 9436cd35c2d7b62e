"""Runs the course for its authors: outputs to be committed, and results of a machine to be kept."""

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from perflab import paths
from perflab.bench.files import put
from perflab.bench.machine import slug
from perflab.errors import PerflabError

from .form import as_text, normalise, notebook_files, write
from .kernel import execute

MACHINE = "nvidia-h200"


def replay_env(home: Path, machine: str = MACHINE) -> dict[str, str | None]:
    """The environment of a replay: recorded results of that machine, and nothing of the user who makes it."""
    return {
        "PERFLAB_MACHINE": machine,
        "PERFLAB_HOME": str(home / "perflab"),
        "PERFLAB_PROGRESS": "off",
        "PERFLAB_BUDGET": None,
        "PERFLAB_RECORD": None,
        "PERFLAB_RECORDED": None,
        "PERFLAB_IMAGES": None,
        "IPYTHONDIR": str(home / "ipython"),
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
    }


def replay(path: Path, machine: str = MACHINE) -> str:
    """The text of the notebook's file after a replay of that machine; the file is left as it is."""
    with tempfile.TemporaryDirectory(prefix="perflab-replay-") as home:
        return as_text(normalise(execute(path, replay_env(Path(home), machine))))


def readme_figure() -> bytes:
    """The PNG that the README shows, drawn from the recorded boards."""
    from perflab.start.board import recorded_boards

    return recorded_boards(MACHINE).picture(MACHINE).data


def run_notebooks(names: str | Path | Iterable[str | Path] = (), machine: str = MACHINE) -> list[Path]:
    """Replay the named notebooks (all without names), write back those that changed, and return these.

    The figure of the README is drawn anew as well.
    """
    changed = []
    put(paths.DATA / "scoreboard.png", readme_figure())
    for path in notebook_files(names):
        start = time.perf_counter()
        if new := write(path, replay(path, machine)):
            changed.append(path)
        print(f"{path.stem:24} {'changed' if new else 'as before':10} {time.perf_counter() - start:5.1f} s")
    return changed


def record(name: str | None = None, names: str | Path | Iterable[str | Path] = ()) -> Path:
    """Measure every notebook at the full budget, and keep the results as those of the machine `name`.

    They go to data/recorded/<name>. What an earlier, broken-off recording has finished is taken
    from build/record/<name>, so that a second call goes on where the first one stopped; delete
    that folder to measure anew. A notebook that fails does not stop the others.
    """
    name = slug() if name is None else name
    if not name or Path(name).name != name or name.startswith("."):
        raise PerflabError(f"{name!r} cannot be the name of a machine; take a plain word like 'nvidia-h200'.")
    kept, work = paths.RECORDED / name, paths.COURSE / "build" / "record" / name
    env = {
        "PERFLAB_MACHINE": None,
        "PERFLAB_RECORD": str(kept),
        "PERFLAB_HOME": str(work),
        "PERFLAB_PROGRESS": "off",
        "PERFLAB_BUDGET": "full",
    }
    failed = []
    for path in notebook_files(names):
        start = time.perf_counter()
        try:
            write(work / "notebooks" / path.name, as_text(normalise(execute(path, env, timeout=3600))))
            state = "recorded"
        except PerflabError as error:
            failed.append(str(error))
            state = "FAILED"
        print(f"{path.stem:24} {state:10} {(time.perf_counter() - start) / 60:6.1f} min", flush=True)
    if failed:
        raise PerflabError("not everything was recorded; call it again to go on.\n  " + "\n  ".join(failed))
    return kept
