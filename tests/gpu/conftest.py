"""Each test has a home and a folder of seats of its own."""

import pytest


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERFLAB_SEATS", str(tmp_path / "seats"))
    monkeypatch.setenv("PERFLAB_PROGRESS", "off")
