"""A notebook that does not say what the recorded results say is refused, whichever way it came about."""

import json
import re
import shutil

import pytest
from run import TEST_TIMEOUT_S, nbval, save

from perflab import places
from perflab.course import check
from perflab.course.form import read
from perflab.course.replay import replay_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

VERDICTS = {"DOES NOT HOLD": "HOLDS", "HOLDS": "DOES NOT HOLD", "CANNOT TELL": "HOLDS HERE"}


def texts(nb):
    """Every readable output of cells that are compared, with a way to put another text in its place."""
    for cell in nb.cells:
        if cell.cell_type != "code" or "nbval-ignore-output" in cell.metadata.get("tags", []):
            continue
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text, lambda text, output=output: output.update(text=text)
            for mime in output.get("data", {}):
                if mime in ("text/plain", "text/html"):
                    yield (
                        output.data[mime],
                        lambda text, output=output, mime=mime: output.data.update({mime: text}),
                    )


def substitute(nb, pattern, replacement):
    """Change the first place that matches; skip where the notebook has none."""
    for text, put in texts(nb):
        mutant = re.sub(pattern, replacement, text, count=1)
        if mutant != text:
            return put(mutant)
    pytest.skip(f"no output of this notebook has {pattern!r}")


def other_label(nb):
    substitute(nb, r"(?m)^(\w{3,})", r"\1x")


def other_count(nb):
    substitute(nb, r"(?<![\w.#])\d+(?![\w.;%])", lambda found: str(int(found.group()) + 1))


def other_verdict(nb):
    substitute(nb, "|".join(VERDICTS), lambda found: VERDICTS[found.group()])


def no_output(nb):
    next(cell for cell in nb.cells if cell.get("outputs")).outputs = []


def nothing_executed(nb):
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def refused(path, env):
    """Whether the guard or the replay finds a fault; the guard first, as it costs nothing."""
    return bool(check([path])) or not nbval(path, env).passed


def test_an_untouched_copy_passes(one_notebook, tmp_path):
    copy = save(read(one_notebook), tmp_path / one_notebook.name)
    recorded = shutil.copytree(places.RECORDED, tmp_path / "recorded")
    assert check([copy]) == []
    compared = nbval(copy, {**replay_env(tmp_path), "PERFLAB_RECORDED": str(recorded)})
    assert compared.passed, compared.said


@pytest.mark.parametrize("mutate", [other_label, other_count, other_verdict, no_output, nothing_executed])
def test_a_changed_output_is_refused(one_notebook, mutate, tmp_path):
    nb = read(one_notebook)
    mutate(nb)
    assert refused(save(nb, tmp_path / one_notebook.name), replay_env(tmp_path))


def test_a_changed_recorded_value_is_refused(one_notebook, tmp_path):
    recorded = shutil.copytree(places.RECORDED, tmp_path / "recorded")
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
