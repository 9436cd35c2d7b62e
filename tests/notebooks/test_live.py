"""The notebooks run on this machine, and every exact statement in them holds here."""

import pytest
from run import TEST_TIMEOUT_S, live_env, nbval

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]
CEILING_S = 30  # of a notebook at the quick budget on two quiet cores, the start of its kernel included


def test_it_runs_here(notebook, live_home, note):
    seconds = _run(notebook, live_home)
    above = f", above the ceiling of {CEILING_S} s" if seconds > CEILING_S else ""
    note(f"{notebook.stem} live: {seconds:.1f} s{above}")


def test_one_runs_again_in_the_home_of_its_first_run(one_notebook, live_home):
    _run(one_notebook, live_home)
    _run(one_notebook, live_home)


@pytest.mark.weekly
def test_each_runs_again_in_the_home_of_its_first_run(notebook, live_home):
    _run(notebook, live_home)
    _run(notebook, live_home)


def _run(notebook, home) -> float:
    """Seconds of one live run under strict nbval."""
    compared = nbval(notebook, live_env(home), "-p", "live_plugin")
    assert compared.passed, compared.said
    return compared.seconds
