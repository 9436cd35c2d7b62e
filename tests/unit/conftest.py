"""Each test has a home, a folder of seats and a quick budget of its own."""

import pytest


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERFLAB_SEATS", str(tmp_path / "seats"))
    monkeypatch.setenv("PERFLAB_PROGRESS", "off")
    for name in ("PERFLAB_MACHINE", "PERFLAB_RECORD", "PERFLAB_RECORDED", "PERFLAB_BUDGET", "PERFLAB_IMAGES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
