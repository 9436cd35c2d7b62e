"""The notebooks run on this machine, and every exact statement in them holds here."""

import pytest
from run import TEST_TIMEOUT_S, live_env, nbval

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]


def test_it_runs_here_and_again_right_after(notebook, live_home, note):
    for which in ("first", "again"):
        compared = nbval(notebook, live_env(live_home), "-p", "live_plugin")
        note(f"{notebook.stem} live, {which}: {compared.seconds:.1f} s")
        assert compared.passed, compared.said
