"""A notebook that does not say what the recorded results say is refused, whichever way it came about."""

import json
import re
import shutil

import pytest
from run import TEST_TIMEOUT_S, differing, nbval, save

from perflab import paths
from perflab.course import check
from perflab.course.form import read
from perflab.course.replay import replay_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

VERDICTS = {"DOES NOT HOLD": "HOLDS", "HOLDS": "DOES NOT HOLD", "CANNOT TELL": "HOLDS HERE"}


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def substitute(nb, pattern, replacement, mutated):
    """Change the first readable output that matches, in a code cell not in `mutated`; the cell's number."""
    for number, cell in enumerate(code_cells(nb)):
        for output in cell.outputs if number not in mutated else ():
            for mime in ("text/plain", "text/html"):
                text = output.get("data", {}).get(mime, "")
                mutant = re.sub(pattern, replacement, text, count=1)
                if mutant != text:
                    output.data[mime] = mutant
                    return number
    raise AssertionError(f"no output of this notebook has {pattern!r}")


def test_each_changed_output_is_refused(notebook):
    """A label, a count, a verdict, a removed output: one copy with a fault of each kind, each found."""
    nb, mutated = mutant(notebook)
    cells = code_cells(nb)
    assert {cells.index(nb.cells[index]) for index in differing(read(notebook), nb)} == mutated


def test_nbval_finds_the_same(one_notebook, tmp_path):
    """And it finds nothing else: this is the strict replay of a notebook, too."""
    nb, mutated = mutant(one_notebook)
    compared = nbval(save(nb, tmp_path / one_notebook.name), replay_env(tmp_path))
    assert set(compared.differing) == mutated, compared.said


def mutant(path):
    """The notebook with a fault of each kind, and the numbers of the code cells that have one."""
    nb = read(path)
    mutated = set()
    mutated.add(substitute(nb, r"(?m)^(\w{3,})", r"\1x", mutated))
    mutated.add(substitute(nb, r"(?<![\w.#])\d+(?![\w.;%])", lambda found: str(int(found.group()) + 1), mutated))
    mutated.add(substitute(nb, "|".join(VERDICTS), lambda found: VERDICTS[found.group()], mutated))
    bare = next(n for n, cell in enumerate(code_cells(nb)) if cell.outputs and n not in mutated)
    code_cells(nb)[bare].outputs = []
    return nb, mutated | {bare}


def test_a_notebook_that_was_not_executed_is_refused(one_notebook, tmp_path):
    nb = read(one_notebook)
    for cell in code_cells(nb):
        cell.outputs, cell.execution_count = [], None
    assert any("not executed" in fault for fault in check([save(nb, tmp_path / one_notebook.name)]))


@pytest.mark.weekly
def test_a_changed_recorded_value_is_refused(one_notebook, tmp_path):
    recorded = shutil.copytree(paths.RECORDED, tmp_path / "recorded")
    studies = sorted(recorded.glob(f"*/{one_notebook.stem[:2]}.*.json"))
    assert studies, f"nothing is recorded for {one_notebook.stem}"
    for study in studies:
        study.write_text(json.dumps(tripled(json.loads(study.read_text("utf-8")))), "utf-8")
    copy = save(read(one_notebook), tmp_path / one_notebook.name)
    compared = nbval(copy, {**replay_env(tmp_path), "PERFLAB_RECORDED": str(recorded)})
    assert compared.differing, compared.said


def tripled(data, sample=False):
    """Recorded JSON with every sample three times as large; the numbers of rounds, which are whole, stay."""
    if isinstance(data, dict):
        return {key: tripled(value, sample or key in ("sample", "samples")) for key, value in data.items()}
    if isinstance(data, list):
        return [tripled(value, sample) for value in data]
    return 3 * data if sample and isinstance(data, float) else data
