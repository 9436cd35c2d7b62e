"""The notebooks run on this machine, and every exact statement in them holds here."""

import pytest
from run import TEST_TIMEOUT_S, live_env, nbval

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

TWICE = "03"  # the shortest one; a second run finds the logbook of the first


def test_it_runs_here(notebook, live_home, note, weekly):
    for which in ("first", "again") if weekly or notebook.stem.startswith(TWICE) else ("first",):
        compared = nbval(notebook, live_env(live_home), "-p", "live_plugin")
        note(f"{compared.seconds:6.1f} s  {notebook.stem}, {which}", "live")
        assert compared.passed, compared.said
