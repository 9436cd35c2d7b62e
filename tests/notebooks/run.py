"""How the tests run a notebook: nbval in a pytest of its own, on the committed file or on a copy."""

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from perflab.course.form import as_text, normalise
from perflab.course.kernel import own_processes

HERE = Path(__file__).parent
CELL_TIMEOUT_S = 600
NOTEBOOK_TIMEOUT_S = 1800
TEST_TIMEOUT_S = 2 * NOTEBOOK_TIMEOUT_S + 60  # so that the notebook is named and not the test
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
        "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
    )
).decode()


@dataclass(frozen=True)
class Compared:
    """What nbval said: the code cells that differ, counted from 0, and all that it printed."""

    passed: bool
    differing: tuple[int, ...]
    said: str
    seconds: float


def nbval(path: Path, env: Mapping[str, str | None], *options: str) -> Compared:
    """Run the notebook strictly under nbval, in a process whose children all end with it."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--color=no", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", str(HERE / "nbval.ini"), f"--rootdir={path.parent}"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT_S}", *options, str(path)]
    start = time.perf_counter()
    with own_processes({"PYTEST_ADDOPTS": None, **env}) as own:
        own["PYTHONPATH"] += os.pathsep + str(HERE)
        how = {"text": True, "capture_output": True, "timeout": NOTEBOOK_TIMEOUT_S}
        done = subprocess.run(command, env=own, cwd=path.parent, **how)
    said = done.stdout + done.stderr
    differing = tuple(int(cell) for cell in re.findall(r"(?m)^FAILED .*::Cell (\d+)", said))
    return Compared(done.returncode == 0, differing, said, time.perf_counter() - start)


def live_env(home: Path) -> dict[str, str | None]:
    """The environment of a learner who measures at the quick budget, with a logbook of the test's own."""
    return {
        "PERFLAB_HOME": str(home),
        "PERFLAB_MACHINE": None,
        "PERFLAB_RECORD": None,
        "PERFLAB_BUDGET": "quick",
        "PERFLAB_PROGRESS": "off",
    }


def differing(was: NotebookNode, now: NotebookNode) -> list[int]:
    """The cells that two notebooks do not share to the byte, counted from 0."""
    pairs = zip(was.cells, now.cells, strict=True)
    return [index for index, (old, new) in enumerate(pairs) if old != new]


def small_notebook() -> NotebookNode:
    """A notebook without a fault: text, a number, a table, a picture."""
    table = {"text/plain": "workers  bytes\n0        12\n2        12", "text/html": "<b>12 B</b>"}
    picture = {"image/png": PIXEL, "text/plain": "a rising line"}
    outputs = [
        [new_output("stream", name="stdout", text="ready\n")],
        [new_output("execute_result", data=table, execution_count=2)],
        [new_output("display_data", data=picture)],
    ]
    code = [new_code_cell(f"step_{n}()", outputs=out, execution_count=n) for n, out in enumerate(outputs, start=1)]
    return normalise(new_notebook(cells=[new_markdown_cell("# A question\n\nHow many bytes?"), *code]))


def save(nb: NotebookNode, path: Path) -> Path:
    """Write the notebook as it is, faults and all."""
    path.write_text(as_text(nb), "utf-8")
    return path


def add_cell(nb: NotebookNode, source: str) -> NotebookNode:
    """The notebook with one more code cell at its end."""
    nb = nbformat.from_dict(nb)
    nb.cells.append(new_code_cell(source, id="added-by-a-test"))
    return nb
