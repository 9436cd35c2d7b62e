"""Running a notebook: what a failure says, that nothing stays behind, that the report needs no network."""

import contextlib
import re
import signal
import subprocess
import sys
import time

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from run import PIXEL, save, small_notebook

from perflab.course import course, execute, normalise, notebook_files, run_notebooks
from perflab.course.form import WIDGET_VIEW, as_text, write
from perflab.course.kernel import carrying, own_processes
from perflab.course.report import page
from perflab.errors import PerflabError

CHILD = (
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
)


pytestmark = pytest.mark.slow


def notebook_of(folder, *sources, name="99_small.ipynb"):
    cells = [new_markdown_cell("# A question"), *map(new_code_cell, sources)]
    return save(normalise(new_notebook(cells=cells)), folder / name)


def marked(env):
    """The mark under which this test's own processes run."""
    return env["PERFLAB_RUN"].split(":")[-1]


def test_an_unknown_notebook_is_answered_with_those_that_exist():
    with pytest.raises(PerflabError, match="no notebook '77'; those of the course are"):
        notebook_files(["77"])


def test_a_file_that_is_no_notebook_is_one_sentence(tmp_path):
    (tmp_path / "x.ipynb").write_text("<<<<<<< HEAD")
    with pytest.raises(PerflabError, match="is not a notebook"):
        execute(tmp_path / "x.ipynb")


def test_a_failing_cell_is_named_with_its_error(tmp_path):
    with pytest.raises(PerflabError, match=r"99_small.ipynb, cell 3 \(In \[2\]\): ZeroDivisionError: division"):
        execute(notebook_of(tmp_path, "1", "1 / 0", "2"))


def test_a_cell_that_takes_too_long_is_named(tmp_path):
    with pytest.raises(PerflabError, match=r"cell 2 \(In \[1\]\): not done after 1 s"):
        execute(notebook_of(tmp_path, "import time; time.sleep(60)"), timeout=1)


def test_a_dead_kernel_is_named(tmp_path):
    with pytest.raises(PerflabError, match=r"cell 2 \(In \[1\]\): the kernel died"):
        execute(notebook_of(tmp_path, "import os; os.kill(os.getpid(), 9)"))


def test_the_kernel_sees_the_environment_given(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_BUDGET", "full")
    ask = "import os; print([os.environ.get(n) for n in ('PERFLAB_MACHINE', 'PERFLAB_BUDGET')], os.getcwd())"
    nb = execute(notebook_of(tmp_path, ask), {"PERFLAB_MACHINE": "m", "PERFLAB_BUDGET": None})
    assert nb.cells[1].outputs[0].text == f"['m', None] {tmp_path}\n"


@pytest.mark.parametrize("end", ["1", "1 / 0", "import os; os.kill(os.getpid(), 9)"])
def test_no_process_is_left_whichever_way_it_ends(tmp_path, monkeypatch, end):
    with own_processes() as outer:
        monkeypatch.setenv("PERFLAB_RUN", outer["PERFLAB_RUN"])
        with contextlib.suppress(PerflabError):
            execute(notebook_of(tmp_path, CHILD, end))
        assert carrying(marked(outer)) == []


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_interrupts_the_cell_and_leaves_nothing(tmp_path, sign, status):
    wait = (
        "import pathlib, time\npathlib.Path('started').touch()\ntry:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('interrupted').touch()\n    raise"
    )
    path = notebook_of(tmp_path, CHILD, wait)
    before = path.read_text()
    with own_processes() as env:
        command = [sys.executable, "-m", "perflab", "notebooks", str(path)]
        program = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True)
        while not (tmp_path / "started").exists():
            assert program.poll() is None, program.stderr.read()
            time.sleep(0.05)
        program.send_signal(sign)
        program.communicate(timeout=120)
        assert (program.returncode, carrying(marked(env))) == (status, [])
    assert (tmp_path / "interrupted").exists()
    assert path.read_text() == before


def test_only_a_changed_notebook_is_written(tmp_path):
    path = notebook_of(tmp_path, "print(6 * 7)")
    assert run_notebooks([path]) == [path]
    written = path.stat().st_mtime_ns
    assert run_notebooks([path]) == []
    assert path.stat().st_mtime_ns == written


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(PerflabError, match="cannot be written"):
        (tmp_path / "folder").mkdir()
        write(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_normal_form_keeps_what_is_read_and_nothing_else():
    view = {WIDGET_VIEW: {"model_id": "1"}, "text/plain": "Explorer", "image/png": PIXEL}
    metadata = {"image/png": {"alt": "a line", "dpi": 7}, "x": 1}
    pictured = new_output("display_data", data=view, metadata=metadata)
    streams = [new_output("stream", name="stdout", text=text) for text in ("1 %\r", "2 %\n", "end\n")]
    cell = new_code_cell("f()", outputs=[*streams, pictured], metadata={"scrolled": True, "tags": ["exercise"]})
    nb = normalise(
        new_notebook(cells=[cell], metadata={"widgets": {}, "kernelspec": {"name": "mine", "display_name": "M"}})
    )
    assert nb.cells[0].outputs[0].text == "2 %\nend\n"
    assert set(nb.cells[0].outputs[1].data) == {"text/plain", "image/png"}
    assert nb.cells[0].outputs[1].metadata == {"image/png": {"alt": "a line"}}
    assert nb.cells[0].metadata == {"tags": ["exercise"]}
    assert set(nb.metadata) == {"kernelspec", "language_info"}
    assert as_text(normalise(nb)) == as_text(nb)


def test_the_report_goes_on_after_a_failure_and_leaves_the_notebooks_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "home"))
    good, bad = small_notebook(), notebook_of(tmp_path, "1", "1 / 0", name="01_bad.ipynb")
    for cell in good.cells[1:]:
        cell.source = "print('here')"
    good = save(good, tmp_path / "02_good.ipynb")
    before = good.read_text(), bad.read_text()
    outcomes = course([bad, good], into=tmp_path / "report")
    assert [bool(outcome.reason) for outcome in outcomes] == [True, False]
    index = (tmp_path / "report" / "index.html").read_text()
    assert "ZeroDivisionError" in index and "1 of 2 notebooks" in index
    assert "ZeroDivisionError" in (tmp_path / "report" / "01_bad.html").read_text()
    assert (good.read_text(), bad.read_text()) == before


def test_a_page_of_the_report_loads_nothing_and_names_its_pictures(tmp_path):
    text = page(small_notebook(), "small", tmp_path)
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?:https?:)?//[^\"']*|import\([^)]*\)|@import[^;]*", text)
    assert re.findall(r'<img alt=[\'"]a rising line[\'"]', text)
    assert "12 B" in text
