"""The logbook and the recorded machines: many writers, damaged files, replays, stand-ins."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from perflab import PerflabError, paths, vary
from perflab.bench import record

WRITER = """
import sys
from perflab.bench import record
for k in range(int(sys.argv[2])):
    if record.append("predictions", "t.many", {"guess": k, "writer": sys.argv[1]}):
        print(k, flush=True)
"""


def sleep(ms):
    time.sleep(ms / 1000)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A recorded machine "some-gpu" with the study t.rec, measured here a moment ago."""
    folder = tmp_path / "recorded"
    monkeypatch.setenv("PERFLAB_RECORDED", str(folder))
    monkeypatch.setenv("PERFLAB_RECORD", str(folder / "some-gpu"))
    result = vary("ms", [1, 2], sleep, study="t.rec", fixed={"size": "small"})
    monkeypatch.delenv("PERFLAB_RECORD")
    return result


def test_many_processes_write_and_a_killed_one_leaves_no_half_entry():
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(w), "50"], stdout=subprocess.PIPE, text=True)
        for w in range(4)
    ]
    for _ in range(3):
        writers[0].stdout.readline()
    os.kill(writers[0].pid, signal.SIGKILL)
    said = {(str(w), int(k)) for w, p in enumerate(writers) for k in p.communicate()[0].split()}
    kept = {(e["writer"], e["guess"]) for e in record.entries("predictions", "t.many")}
    assert {(str(w), k) for w in (1, 2, 3) for k in range(50)} <= kept
    assert said <= kept | {("0", 0), ("0", 1), ("0", 2)} and {("0", 0), ("0", 1), ("0", 2)} <= kept


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"schema": 99}', "newer perflab"),
        ('{"schema": 1, "a', "cut short"),
        ("[]", "cut short"),
        ('{"schema": "x"}', "cut short"),
        ('{"schema": 1, "name": "t.x"}', "lacks guess"),
    ],
)
def test_a_damaged_or_newer_entry_is_named_and_the_rest_is_read(content, word, capsys):
    record.append("predictions", "t.x", {"guess": 1})
    (paths.home() / "predictions" / f"t.x.9-{abs(hash(content))}-9.json").write_text(content)
    assert [e["guess"] for e in record.entries("predictions", "t.x")] == [1]
    assert word in capsys.readouterr().err


def test_a_home_that_cannot_be_written_costs_one_sentence_and_no_result(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("PERFLAB_HOME", str(blocked))
    r = vary("ms", [1, 2], sleep, study="t.nohome")
    vary("ms", [1, 2], sleep, study="t.nohome")
    err = capsys.readouterr().err
    assert r.measured == ["1", "2"]
    assert err.count("Results are not kept") == 1 and "PERFLAB_HOME" in err


def test_a_full_disk_costs_one_sentence_and_leaves_no_file(monkeypatch, capsys):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(record, "_told", set())
    assert record.append("results", "t.full", {"k": 1}) is None
    assert "No space left on device" in capsys.readouterr().err
    assert list((paths.home() / "results").iterdir()) == []


def test_a_replay_returns_the_recorded_result_and_measures_nothing(recorded, monkeypatch):
    monkeypatch.setenv("PERFLAB_MACHINE", "some-gpu")
    r = vary("ms", [1, 2, 99], lambda ms: 1 / 0, study="t.rec", fixed={"size": "small"})
    assert r.source == "some-gpu" and r.ratio(2, 1).mid == recorded.ratio(2, 1).mid
    assert "99 was not measured" in r.ratio(99, 1).why
    assert r.ratio(2, 1).at_least(1).source == "some-gpu"


def test_other_labels_version_or_study_are_one_sentence(recorded, monkeypatch):
    monkeypatch.setenv("PERFLAB_MACHINE", "some-gpu")
    for changed in ({"fixed": {"size": "large"}}, {"fixed": {"size": "small"}, "version": 2}):
        with pytest.raises(PerflabError, match="recorded on some-gpu as version 1 with size = small"):
            vary("ms", [1], sleep, study="t.rec", **changed)
    with pytest.raises(PerflabError, match=r"t\.other is not recorded"):
        vary("ms", [1], sleep, study="t.other")


def test_an_unknown_machine_names_those_recorded(recorded, monkeypatch):
    monkeypatch.setenv("PERFLAB_MACHINE", "toaster")
    with pytest.raises(PerflabError, match="Recorded: some-gpu"):
        vary("ms", [1], sleep, study="t.rec")


def test_an_unmet_need_is_stood_in_for_and_says_so(recorded):
    r = vary("ms", [1, 2], lambda ms: 1 / 0, study="t.rec", fixed={"size": "small"}, needs=("nosuch",))
    assert r.source == "some-gpu"
    assert "Recorded, not measured here" in r.provenance and "nosuch is not installed" in r.provenance


def test_a_recorded_machine_stands_beside_a_measurement(recorded):
    r = vary("ms", [1, 2], sleep, study="t.rec", fixed={"size": "small"})
    assert [other.source for other in record.beside(r)] == ["some-gpu"]


def test_a_recording_goes_on_where_it_was_interrupted(recorded, monkeypatch, tmp_path):
    monkeypatch.setenv("PERFLAB_RECORD", str(tmp_path / "recorded" / "again"))
    r = vary("ms", [1, 2], sleep, study="t.rec", fixed={"size": "small"})
    assert r.seconds == recorded.seconds
    changed = vary("ms", [1, 2, 3], sleep, study="t.rec", fixed={"size": "small"})
    assert changed.values == ["1", "2", "3"]


@pytest.mark.parametrize("content", ['{"schema": 1}', '{"schema": 1, "study": "t.rec", "new": 3}', "{"])
def test_a_recorded_file_that_is_no_result_is_one_sentence(recorded, tmp_path, monkeypatch, content):
    (path,) = (tmp_path / "recorded" / "some-gpu").iterdir()
    path.write_text(content)
    monkeypatch.setenv("PERFLAB_MACHINE", "some-gpu")
    with pytest.raises(PerflabError, match="delete it"):
        vary("ms", [1], sleep, study="t.rec", fixed={"size": "small"})


def test_entries_of_another_name_are_not_taken_for_one_s_own():
    record.append("predictions", "A", {"guess": 1})
    record.append("predictions", "A.b", {"guess": 2})
    record.append("predictions", "x < 3?", {"guess": 3})
    assert [e["guess"] for e in record.entries("predictions", "A")] == [1]
    assert list(record.entries("predictions", "x > 3?")) == []


PLANTED = {"02.bytes": {"float32, 10000000"}}  # what cannot fit anywhere, to show that the sweep goes on


def test_the_recorded_results_have_no_failed_value_but_planted_ones():
    for path in paths.RECORDED.glob("*/*.json"):
        result = json.loads(path.read_text())
        assert set(result["reasons"]) == PLANTED.get(result["study"], set()), path.name


def test_a_recorded_file_is_plain_json(recorded, tmp_path):
    (path,) = (tmp_path / "recorded" / "some-gpu").iterdir()
    assert path.name == "t.rec--size=small.json"
    data = json.loads(path.read_text())
    assert data["schema"] == 1 and "source" not in data
    assert os.uname().nodename not in path.read_text()
