"""What sets the course up says one thing: pyproject.toml, constraints.txt, environment.yml, Makefile."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from perflab.paths import COURSE

PROJECT = tomllib.loads((COURSE / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((COURSE / "environment.yml").read_text())
MAKEFILE = (COURSE / "Makefile").read_text()
OF_CONDA = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
MODULES = {
    "pillow": "PIL",
    "nvidia-ml-py": "pynvml",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "codespell": "codespell_lib",
}


def ranges(texts: list[str]) -> dict[str, SpecifierSet]:
    """Range by name; conda writes "name >=1", which reads as a requirement, too."""
    wanted = map(Requirement, texts)
    return {canonicalize_name(OF_CONDA.get(one.name, one.name)): one.specifier for one in wanted}


CORE = ranges(PROJECT["dependencies"])
TEST = ranges(PROJECT["optional-dependencies"]["test"])
PINS = ranges([line for line in (COURSE / "constraints.txt").read_text().splitlines() if line[0] != "#"])


def variable(name: str) -> str:
    return re.search(rf"^{name} \??= (.*)$", MAKEFILE, re.MULTILINE)[1]


def make(*words: str, folder=COURSE) -> subprocess.CompletedProcess:
    """A make of its own: it hears nothing of the make that may run these tests."""
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "VENV", "TORCH", "PIP_ARGS", "PORT", "NB", "WEEKLY"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", "-C", str(folder), *words], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def bare(tmp_path):
    """A course folder in which nothing is set up; its name has a space."""
    folder = tmp_path / "bare course"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(COURSE / name, folder)
    return folder


def test_conda_and_pip_ask_for_the_same_packages_in_the_same_ranges():
    conda = ranges([entry for entry in CONDA["dependencies"] if isinstance(entry, str)])
    assert conda.pop("python") == SpecifierSet(PROJECT["requires-python"])
    tools = {"pip", "setuptools"}  # they install perflab itself
    without = {"playwright"}  # the browser tests are skipped there
    assert {name: conda[name] for name in conda.keys() - tools} == {
        name: wanted for name, wanted in (CORE | TEST).items() if name not in without
    }


def test_conda_takes_nothing_but_perflab_from_elsewhere():
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    (pip,) = (entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))
    assert [line.split() for line in pip] == [["--no-deps", "--no-build-isolation", "-e", "."]]


def test_every_direct_dependency_but_torch_is_pinned_inside_its_range():
    wanted = CORE | TEST
    assert wanted.keys() - PINS.keys() == {"torch"}
    for name in wanted.keys() & PINS.keys():
        (pin,) = PINS[name]
        assert pin.operator == "==" and pin.version in wanted[name], f"{name}: {pin} and {wanted[name]}"


def test_the_torch_that_make_installs_lies_in_the_range():
    (pin,) = Requirement(variable("TORCH")).specifier
    assert pin.operator == "==" and pin.version in CORE["torch"]


def test_make_looks_for_every_dependency_in_an_interpreter_as_it_is():
    assert set(variable("MODULES").split()) == {MODULES.get(name, name) for name in CORE}
    assert set(variable("TEST_MODULES").split()) == {MODULES.get(name, name) for name in TEST} - {"playwright"}


def test_make_knows_the_range_of_python():
    low, high = re.search(r"\((3, \d+)\) <= sys.version_info < \((3, \d+)\)", MAKEFILE).groups()
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={low},<{high}".replace(", ", "."))


def test_make_alone_lists_the_commands():
    shown = make().stdout
    for command in ("lab", "test", "course", "doctor", "data", "record", "notebooks", "lint", "clean"):
        assert f"make {command} " in shown


def test_without_a_python_make_names_the_way_out(bare):
    done = make("lab", "PYTHON=no-such-python", folder=bare)
    assert done.returncode == 2
    assert "there is no no-such-python: install Python 3.11 to 3.14 or name one with PYTHON=" in done.stderr


@pytest.mark.parametrize(
    "fails, says",
    [("*version_info*", "and 3.11 to 3.14 is needed"), ("*ensurepip*", "apt install python3-venv")],
)
def test_a_python_that_will_not_do_is_refused_before_anything_is_made(bare, fails, says):
    python = bare / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in {fails}) exit 1;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = make("lab", f"PYTHON={python}", "VENV=my venv", folder=bare)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (bare / "my venv").exists()


def test_a_folder_that_is_no_venv_is_left_alone(bare):
    (bare / "mine").mkdir()
    (bare / "mine" / "thesis.txt").write_text("unsaved")
    done = make("lab", f"PYTHON={sys.executable}", "VENV=mine", folder=bare)
    assert done.returncode == 2
    assert "mine holds something else than a venv" in done.stderr
    assert [path.name for path in (bare / "mine").iterdir()] == ["thesis.txt"]


def test_an_interpreter_as_it_is_hears_what_it_lacks(bare):
    makefile = bare / "Makefile"
    makefile.write_text(makefile.read_text().replace("MODULES = torch ", "MODULES = torch no_such_module ", 1))
    done = make("lab", "VENV=", f"PYTHON={sys.executable}", folder=bare)
    assert done.returncode == 2
    assert f"{sys.executable} lacks no_such_module: install it there" in done.stderr


def test_the_settings_keep_sliders_on_the_main_thread_and_ask_no_server():
    settings = COURSE / ".jupyter" / "labconfig" / "default_setting_overrides.json"
    found = yaml.safe_load(settings.read_text())
    assert found == {
        "@jupyterlab/apputils-extension:kernels-settings": {"commsOverSubshells": "disabled"},
        "@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"},
    }
