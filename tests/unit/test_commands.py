"""The commands of `python -m perflab`, and how the server of the course is started."""

import socket
import sys

import pytest

from perflab import __main__, lab
from perflab.errors import PerflabError
from perflab.paths import COURSE


@pytest.fixture(autouse=True)
def own_signals(monkeypatch):
    """A command answers SIGTERM in its own way; the test run keeps its answer."""
    monkeypatch.setattr("signal.signal", lambda *_: None)


@pytest.fixture
def taken():
    with socket.socket() as other:
        other.bind((lab.ADDRESS, 0))
        other.listen()
        yield other.getsockname()[1]


def test_the_server_stays_on_this_machine_and_keeps_its_token():
    line = " ".join(lab.command(8890))
    assert "--ServerApp.ip=127.0.0.1" in line
    assert "token" not in line and "password" not in line


def test_only_a_named_port_is_insisted_on():
    assert not [word for word in lab.command() if "port" in word]
    assert {"--ServerApp.port=8890", "--ServerApp.port_retries=0"} <= set(lab.command(8890))


@pytest.mark.parametrize("user, allowed", [(0, True), (1000, False)])
def test_root_is_allowed_only_as_root(monkeypatch, user, allowed):
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert ("--allow-root" in lab.command()) is allowed


def test_the_settings_of_the_course_come_first_and_others_stay():
    given = {"JUPYTER_CONFIG_PATH": f"/hub/config:{lab.SETTINGS}", "PYTHONPATH": "", "LANG": "C"}
    made = lab.environment(given)
    assert made["JUPYTER_CONFIG_PATH"] == f"{lab.SETTINGS}:/hub/config"
    assert made["PYTHONPATH"] == str(COURSE)
    assert made["LANG"] == "C"
    assert lab.environment(made) == made


def test_a_taken_port_is_said_before_the_server_starts(taken, capsys):
    assert __main__.main(["lab", "--port", str(taken)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"perflab: Port {taken} is in use: name another, as in make lab PORT=")
    assert said.count("\n") == 1


def test_a_port_that_cannot_exist_is_refused():
    with pytest.raises(PerflabError, match="no port 70000: name one up to 65535"):
        lab.check_free(70000)


def test_a_missing_jupyterlab_names_the_way_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PerflabError, match=f"{sys.executable} has no JupyterLab: `make lab` installs it"):
        lab.main()


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(port):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "main", interrupted)
    assert __main__.main(["lab"]) == 130
    assert "Traceback" not in capsys.readouterr().err
