"""Runs a notebook in a kernel of its own and leaves no process behind; what is run is not its business."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from perflab import paths
from perflab.errors import PerflabError

from .form import read

MARK = "PERFLAB_RUN"
GRACE_S = 10  # for a kernel that was interrupted to log what it has measured


class ThisInterpreter(KernelSpecManager):
    """Every kernel name means the interpreter that runs this program, whatever the user has registered."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


def execute(path: Path, env: Mapping[str, str | None] | None = None, timeout: float = 1200) -> NotebookNode:
    """The notebook after a run of all its cells in a fresh kernel; the file is left as it is.

    The kernel works in the notebook's folder. `env` is added to its environment, and a None takes
    a variable away. `timeout` is in seconds and holds for each cell. A failing cell raises
    PerflabError.
    """
    nb = read(path)
    run(nb, path, env, timeout)
    return nb


def run(nb: NotebookNode, path: Path, env: Mapping[str, str | None] | None = None, timeout: float = 1200) -> None:
    """As `execute`, into the notebook at hand, so that a caller has the outputs up to a failing cell."""
    at = {"cell": 0}
    failures: list[BaseException] = []
    client = NotebookClient(
        nb,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter()),
        timeout=timeout,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: at.update(cell=cell_index),
    )

    def work() -> None:
        try:
            asyncio.run(client.async_execute(env=own, stderr=subprocess.DEVNULL, cleanup_kc=True))
        except BaseException as error:  # raised again by the thread that waits
            failures.append(error)

    # A thread, so that Ctrl-C reaches this function and not the event loop of nbclient, which
    # would report it as a dead kernel.
    thread = threading.Thread(target=work, daemon=True)
    with own_processes(env) as own:
        thread.start()
        try:
            thread.join()
        except BaseException:
            _interrupt(client)
            thread.join(GRACE_S)
            raise
        if failures:
            where = f"{path.name}, {cell_name(nb, at['cell'])}" if nb.cells else path.name
            raise _told(failures[0], path.name, where, timeout) from failures[0]


def cell_name(nb: NotebookNode, index: int) -> str:
    """A cell as messages call it: its place among all cells, and for code the number it runs under."""
    name = f"cell {index + 1}"
    if nb.cells[index].cell_type == "code":
        before = [cell for cell in nb.cells[: index + 1] if cell.cell_type == "code" and cell.source.strip()]
        name += f" (In [{len(before)}])"
    return name


@contextlib.contextmanager
def own_processes(env: Mapping[str, str | None] | None = None) -> Iterator[dict[str, str]]:
    """An environment for children; every process that carries it is ended with the block.

    The mark goes with the environment, so that it finds what has left its parent and its session:
    workers, ranks, servers.
    """
    mark = uuid.uuid4().hex
    whole = {**os.environ, "MPLBACKEND": None, **(env or {})}
    whole["PYTHONPATH"] = os.pathsep.join(filter(None, [str(paths.COURSE), whole.get("PYTHONPATH")]))
    whole[MARK] = ":".join(filter(None, [os.environ.get(MARK), mark]))
    try:
        yield {name: str(value) for name, value in whole.items() if value is not None}
    finally:
        _end(mark)


def carrying(mark: str) -> list[psutil.Process]:
    """The live processes whose environment carries this mark, this one left out."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and mark in process.environ().get(MARK, ""):
                processes.append(process)
    return processes


def _end(mark: str) -> None:
    for stop in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        processes = carrying(mark)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                stop(process)
        psutil.wait_procs(processes, timeout=3)


def _interrupt(client: NotebookClient) -> None:
    """What the stop button does: SIGINT to the kernel and its group, so that a sweep logs and closes."""
    pid = getattr(getattr(client.km, "provisioner", None), "pid", None)
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGINT)


def _told(error: BaseException, name: str, where: str, timeout: float) -> BaseException:
    """What a caller hears of an error in a run: of a cell's own error its type and its words."""
    if isinstance(error, CellExecutionError):
        words = re.sub(r"\x1b\[[0-9;]*m", "", error.evalue or "").strip()
        return PerflabError(f"{where}: {error.ename}: {words}")
    if isinstance(error, CellTimeoutError):
        return PerflabError(f"{where}: not done after {timeout:g} s.")
    if isinstance(error, DeadKernelError):
        return PerflabError(f"{where}: the kernel died; the usual cause is that the memory ran out.")
    if isinstance(error, Exception):
        return PerflabError(f"{name}: no kernel could be used: {type(error).__name__}: {error}")
    return error
