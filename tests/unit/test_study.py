"""The schedule: what it measures, how it fails, what it keeps."""

import contextlib
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from perflab import PerflabError, observe, samples, vary
from perflab.bench import record
from perflab.bench.estimate import CANNOT, HOLDS, NOT
from perflab.bench.result import Result

pytestmark = pytest.mark.timed


def sleep(ms):
    time.sleep(ms / 1000)


def product(a):
    return a @ a


def test_a_ratio_is_a_over_b_from_the_same_rounds():
    r = vary("ms", [2, 6], sleep, study="t.sleep")
    assert r.ratio(6, 2).within(2, 3.2).state != NOT
    assert 2 < r.ratio(6, 2).mid < 3.2
    assert r.ratio(6, 2).mid == pytest.approx(1 / r.ratio(2, 6).mid)


def test_the_cheapest_value_is_measured_twice():
    r = vary("ms", [3, 1], sleep, study="t.sleep")
    assert r.noise.what == "time_s of 1 (again) / 1" and r.noise.n == r["time_s"].of(1).n


def test_a_failed_value_is_a_row_not_the_end():
    def run(kind):
        if kind == "bad":
            raise ValueError("first line\nsecond line")
        sleep(1)

    def prepare(kind):
        return {"good": kind, "bad": kind, "fine": kind}[kind]

    r = vary("kind", ["good", "bad", "gone", "fine"], run, prepare=prepare, study="t.fails")
    assert r.measured == ["good", "fine"]
    assert r.reasons == {"gone": "prepare: KeyError: 'gone'", "bad": "round 0: ValueError: first line"}
    gone = r.ratio("good", "bad").at_least(1)
    assert gone.state == CANNOT and "ValueError: first line" in gone.seen


@pytest.mark.parametrize("keep", [True, False])
def test_prepared_values_are_entered_and_closed_on_every_path(keep):
    state = []

    @contextlib.contextmanager
    def prepare(n):
        state.append(n)
        try:
            yield n
        finally:
            state.remove(n)

    def run(n):
        assert n in state and len(state) == (2 if keep else 1)
        if n == 2 and len(calls) > 3:
            raise RuntimeError("late")
        calls.append(n)

    calls = []
    r = vary("n", [1, 2], run, prepare=prepare, study="t.closed", keep=keep)
    assert state == [] and "late" in r.reasons["2"]


def test_none_is_a_value_like_another():
    r = vary("cap", [None, 2], lambda x: sleep(1), study="t.none")
    assert r.values == ["None", "2"] and r.ratio(None, 2).n >= 6


def test_a_run_may_have_clocks_of_its_own():
    def run(ms):
        sleep(ms)
        return samples(half_s=ms / 2000, steps_s=[0.1, 0.3, 0.2])

    r = vary("ms", [4], run, study="t.clocks")
    assert r["half_s"].of(4).mid == pytest.approx(0.002)
    assert r["steps_s"].of(4).mid == pytest.approx(0.2)
    assert 0.3 < r["half_s"].over(r["time_s"], 4).mid < 0.51


def test_rates_follow_from_work_that_may_depend_on_the_value():
    r = vary("n", [2, 4], sleep, study="t.rate", per="image", work=lambda n: n)
    assert r["images_per_s"].ratio(2, 4).within(0.7, 1.4).state != NOT
    assert r.ratio(2, 4).mid == pytest.approx(r["images_per_s"].ratio(4, 2).mid)
    assert r["images_per_s"].of(4).mid == pytest.approx(4 / r["time_s"].of(4).mid)


def test_counts_are_taken_twice_and_must_agree():
    drawn = iter(range(100))
    r = vary(
        "kind",
        {"steady": lambda: 3, "drifting": lambda: next(drawn)},
        lambda f: None,
        counts=lambda f: {"kernels": f()},
        study="t.counts",
    )
    assert r.count("kernels", "steady").equals(3).state == HOLDS
    assert "disagree" in r.reasons["drifting"]


def test_the_knee_is_a_set():
    def run(n):
        time.sleep(0.008 / min(n, 2))

    r = vary("n", [1, 2, 4, 8], run, study="t.knee", per="item", work=8)
    assert "2" in r.knee().values and "1" not in r.knee().values


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: vary("n", [1], sleep), "study="),
        (lambda: vary("n", [1], sleep, study="a b"), "study="),
        (lambda: vary("n", [], sleep, study="t.x"), "at least one value"),
        (lambda: vary("n", [1, "1"], sleep, study="t.x"), "same label"),
        (lambda: vary("n", [1], sleep, study="t.x", clock="sun"), "clock"),
        (lambda: vary("n", [1], sleep, study=12), "study="),
        (lambda: vary("n", 5, sleep, study="t.x"), "a list or a mapping"),
        (lambda: vary("n", ["a "], sleep, study="t.x"), "space"),
        (lambda: vary("n", ["a (again)"], sleep, study="t.x"), "again"),
        (lambda: vary("n", [1], sleep, study="t.x", fixed={"d": torch.float32}), "fixed="),
        (lambda: vary("n", [1], sleep, study="t.x", work=0), "above zero"),
        (lambda: observe("", {}), "study="),
    ],
)
def test_a_call_that_cannot_be_measured_is_one_sentence(call, word):
    with pytest.raises(PerflabError, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_unknown_budget_names_those_that_exist(monkeypatch):
    monkeypatch.setenv("PERFLAB_BUDGET", "foo")
    with pytest.raises(PerflabError, match="quick, full"):
        vary("n", [1], sleep, study="t.x")


def test_an_unmet_need_without_a_record_says_what_is_missing():
    r = vary("n", [1, 2], sleep, study="t.need", needs=("nosuchpackage",))
    assert "nosuchpackage is not installed" in r.provenance
    assert r["time_s"].ratio(1, 2).at_least(1).state == CANNOT
    assert r["anything_s"].of(1).why


def test_threads_are_recorded_and_given_back():
    before = torch.get_num_threads()
    r = vary("n", [1], lambda n: torch.set_num_threads(1), study="t.threads")
    assert torch.get_num_threads() == before and 1 <= r.settings["threads"] <= before


def test_a_result_survives_the_logbook():
    r = vary("ms", [1, 2], sleep, study="t.kept", fixed={"model": "none"}, per="image", work=3)
    (entry,) = record.entries("results", "t.kept")
    again = Result.from_json(entry)
    assert again.ratio(1, 2) == r.ratio(1, 2) and repr(again) == repr(r)


def test_a_table_has_a_row_per_sample():
    r = vary("ms", [1, "x"], sleep, study="t.table")
    table = r.table()
    assert list(table.columns) == ["value", "round", "metric", "unit", "sample", "status", "source"]
    assert "TypeError" in table[table.value == "x"].status.iloc[0]
    assert table[(table.value == "1") & (table.metric == "time_s")]["round"].nunique() == r["time_s"].of(1).n


def test_observed_rows_are_exact_unless_said_to_be_timed():
    r = observe("t.map", {"read": {"pid": 7, "cost_s": 0.25}}, timed=("cost_s",))
    assert "pid 7" in repr(r) and "0.25" not in repr(r)
    assert r["cost_s"].of("read").mid == 0.25


def test_stable_text_is_the_same_in_two_runs():
    runs = [vary("ms", {"a": 1, "b": 2}, sleep, study="t.text", fixed={"k": 1}) for _ in range(2)]
    assert repr(runs[0]) == repr(runs[1]) == "Result t.text: ms = a, b; k = 1\n  timed: time_s (s)"


def test_a_schedule_goes_on_to_an_interval_however_small_its_budget():
    assert vary("ms", [30, 60], sleep, study="t.slow", budget_s=0.01)["time_s"].of(30).n == 6


def test_where_that_takes_too_long_it_keeps_what_it_has(monkeypatch):
    from perflab.bench import plan

    monkeypatch.setitem(plan.PLANS, "quick", replace(plan.PLANS["quick"], patience_s=0.1))
    r = vary("ms", [30, 60], sleep, study="t.slow", budget_s=0.01)
    assert 1 <= r["time_s"].of(30).n < 6 and r.ratio(30, 60).at_least(0.5).state == CANNOT


def test_what_was_measured_survives_an_exit():
    calls = []

    def run(n):
        calls.append(n)
        if len(calls) > 40:
            raise SystemExit(3)
        sleep(1)

    with pytest.raises(SystemExit):
        vary("n", [1, 2], run, study="t.exit")
    (entry,) = record.entries("results", "t.exit")
    assert entry["stopped"] == "ended by SystemExit" and entry["samples"]["time_s"]


def test_values_that_came_as_they_are_are_not_closed(tmp_path):
    with open(tmp_path / "f", "w+") as file:
        vary("n", {"a": file}, lambda f: f.tell(), study="t.own")
        vary("n", {"a": file}, lambda f: f.tell(), study="t.own", keep=False)
        assert not file.closed


def test_scalars_of_numpy_and_torch_are_counts_too():
    r = vary("n", [1], lambda n: None, counts=lambda n: {"a": np.int64(3), "b": torch.tensor(4)}, study="t.scalar")
    assert r.counts["1"] == {"a": 3, "b": 4}
    r = vary("n", [1], lambda n: None, counts=lambda n: {"a": [1]}, study="t.scalar")
    assert "a is list" in r.reasons["1"]


def test_a_clock_that_is_no_number_is_a_reason():
    r = vary("n", [1, 2], lambda n: samples(wait_s="long" if n == 2 else 0.1), study="t.clock")
    assert r.measured == ["1"] and "ValueError" in r.reasons["2"]
    assert "time_s" in vary("n", [1], lambda n: samples(time_s=1), study="t.clock").reasons["1"]


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_the_same_is_not_called_different(busy, busy_neighbours):
    """A/A: a callable against itself. The whole bar, 100 comparisons, with PERFLAB_TRIALS=100."""
    trials = int(os.environ.get("PERFLAB_TRIALS", "6"))
    a = torch.randn(220, 220)
    torch.set_num_threads(1)
    with busy_neighbours(int(busy)):
        wrong = 0
        for _ in range(trials):
            r = vary("which", {"a": a, "b": a}, product, study="t.aa")
            wrong += r.ratio("a", "b").differs().state == HOLDS
    assert wrong <= max(1, 0.02 * trials)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_a_planted_difference_is_seen_and_never_reversed(factor):
    def spin(scale):
        until = time.perf_counter() + 0.001 * scale
        while time.perf_counter() < until:
            pass

    trials = int(os.environ.get("PERFLAB_TRIALS", "20")) // 5
    states = [
        vary("scale", {"slow": factor, "fast": 1.0}, spin, study="t.planted").ratio("slow", "fast").differs()
        for _ in range(trials)
    ]
    reversed_ = [s for s in states if s.state == NOT]
    assert not reversed_ and sum(s.state == HOLDS for s in states) >= 0.75 * trials


@pytest.mark.slow
def test_times_agree_with_torchs_own_timer():
    """The same calls per block, the same statistic, interleaved; medians of pairs within 3 %, wide in CI."""
    from statistics import median

    from torch.utils.benchmark import Timer

    a = torch.randn(220, 220)
    pairs = []
    for _ in range(5):
        r = vary("which", {"a": a}, product, study="t.timer", budget_s=1)
        timer = Timer("product(a)", globals={"product": product, "a": a}, num_threads=torch.get_num_threads())
        pairs.append(r["time_s"].of("a").mid / timer.blocked_autorange(min_run_time=0.05).median)
    assert 0.8 < median(pairs) < 1.25
