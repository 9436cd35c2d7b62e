"""The committed notebooks say what the recorded results say, to the byte."""

import pytest
from run import TEST_TIMEOUT_S, differences, nbval

from perflab.course.form import as_text, normalise, read
from perflab.course.replay import replay, replay_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]


def test_a_replay_shows_what_is_committed(notebook, tmp_path):
    compared = nbval(notebook, replay_env(tmp_path))
    assert compared.passed, compared.said


def test_a_replay_gives_the_committed_bytes(notebook, tmp_path):
    text = replay(notebook)
    again = tmp_path / notebook.name
    again.write_text(text, "utf-8")
    assert text == notebook.read_text("utf-8"), (
        f"this replay differs; run `make notebooks`\n{differences(read(notebook), read(again))}"
    )


def test_the_normal_form_of_a_normal_form_is_itself(notebook):
    assert as_text(normalise(normalise(read(notebook)))) == as_text(normalise(read(notebook)))
