"""What the README says must be so."""

import re

from perflab import paths
from perflab.bench.record import recorded
from perflab.course.form import notebook_files
from perflab.course.replay import MACHINE, readme_figure
from perflab.start.split import Split

TEXT = (paths.COURSE / "README.md").read_text()


def test_its_figure_is_drawn_from_the_recorded_result():
    assert (paths.DATA / "scoreboard.png").read_bytes() == readme_figure()


def test_its_split_is_the_recorded_one():
    shown = TEXT.split("```")[3].strip().splitlines()
    assert shown == str(Split(recorded(MACHINE, "00.loop", 1, {}))).splitlines()[: len(shown)]


def test_its_table_has_every_notebook():
    assert re.findall(r"\(notebooks/(\w+)\.ipynb\)", TEXT) == [p.stem for p in notebook_files()]


def test_its_links_and_commands_exist():
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (paths.COURSE / target).exists(), target
    makefile = (paths.COURSE / "Makefile").read_text()
    for command in re.findall(r"\bmake ([a-z]+)\b", TEXT):
        if command not in ("alone",):
            assert re.search(rf"^{command}:", makefile, re.M) or command in ("sure",), command


def test_the_variables_it_lists_are_those_that_are_read():
    read = set()
    for path in (paths.COURSE / "perflab").rglob("*.py"):
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"(PERFLAB_\w+)\"", path.read_text()))
    assert read - {"PERFLAB_RECORD", "PERFLAB_RECORDED"} <= set(re.findall(r"`(PERFLAB_\w+)", TEXT)), read
