"""Start JupyterLab for the course: this machine only, behind its token, with the course's settings."""

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping

from perflab.errors import PerflabError
from perflab.paths import COURSE

ADDRESS = "127.0.0.1"
SETTINGS = COURSE / ".jupyter"
FIRST_PAGE = "/lab/tree/notebooks/00_start_here.ipynb"


def main(port: int | None = None) -> None:
    """Become the JupyterLab server, so that Ctrl-C and signals reach it and nothing stays behind.

    Without `port` JupyterLab takes 8888 or the next free one. Raises PerflabError where JupyterLab is
    missing or the named port cannot be had.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise PerflabError(f"{sys.executable} has no JupyterLab: `make lab` installs it in an environment.")
    if port is not None:
        check_free(port)
    sys.stdout.flush()
    os.execve(sys.executable, command(port), environment(os.environ))


def command(port: int | None = None) -> list[str]:
    """The server's command line. The token stays as Jupyter makes it: new at every start."""
    line = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.ip={ADDRESS}",
        f"--ServerApp.root_dir={COURSE}",
        f"--LabApp.default_url={FIRST_PAGE}",
    ]
    if port is not None:
        line += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:
        line.append("--allow-root")
    return line


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the course's settings first, and kernels that find this package.

    The Python that runs the server also runs the kernels, whatever kernels the user has registered.
    """
    first = {"JUPYTER_CONFIG_PATH": str(SETTINGS), "PYTHONPATH": str(COURSE)}
    paths = {name: [path, *given.get(name, "").split(os.pathsep)] for name, path in first.items()}
    joined = {name: os.pathsep.join(dict.fromkeys(filter(None, parts))) for name, parts in paths.items()}
    return {"JUPYTER_PREFER_ENV_PATH": "1", **given, **joined}


def check_free(port: int) -> None:
    """Raise PerflabError unless a server of this user could listen on `port`."""
    if not 0 < port < 65536:
        raise PerflabError(f"There is no port {port}: name one up to 65535, as in make lab PORT=8890.")
    other = port + 1 if 1024 <= port < 65535 else 8890
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will do
        try:
            trial.bind((ADDRESS, port))
        except OSError as error:
            why = "in use" if error.errno == errno.EADDRINUSE else f"refused ({error.strerror})"
            raise PerflabError(f"Port {port} is {why}: name another, as in make lab PORT={other}.") from None
