"""The arithmetic of estimates, against published tables and exact laws."""

import math

import numpy as np
import pytest

from perflab.bench.estimate import CANNOT, HOLDS, NOT, Estimate, Finding, interval


def test_the_interval_drops_as_many_walsh_averages_as_the_signed_rank_table_says():
    # Critical values of Wilcoxon's signed-rank statistic, two-sided 5 %: n = 6: 0, 8: 3, 10: 8, 15: 25.
    for n, critical in ((6, 0), (8, 3), (10, 8), (15, 25)):
        x = np.sort(np.random.default_rng(n).normal(size=n))
        walsh = np.sort([(x[i] + x[j]) / 2 for i in range(n) for j in range(i, n)])
        assert interval(x) == (np.median(walsh), walsh[critical], walsh[-critical - 1])


def test_below_six_rounds_there_is_no_interval():
    assert interval([1.0] * 5)[1:] == (-math.inf, math.inf)
    assert Estimate.of([1.0] * 5, "x").limits == "no interval from 5 rounds"


@pytest.mark.parametrize(
    ("rounds", "threshold", "state"),
    [
        ([1.06], 2, CANNOT),
        ([1.06, 1.07], 2, NOT),
        ([1.06, 1.4], 2, CANNOT),
        ([3.1, 4], 2, HOLDS),
        ([2.9, 4], 2, CANNOT),
        ([-4, -5], -2, NOT),
        ([-1, -1.2], -2, HOLDS),
    ],
)
def test_few_rounds_decide_only_what_each_of_them_clears_by_half(rounds, threshold, state):
    assert Estimate.of(rounds, "x").at_least(threshold).state == state


@pytest.mark.parametrize(
    ("lo", "hi", "states"),
    [
        (1.9, 2.1, (HOLDS, CANNOT, HOLDS)),
        (1.3, 1.4, (CANNOT, CANNOT, HOLDS)),
        (0.5, 0.6, (NOT, HOLDS, CANNOT)),
        (8.0, 9.0, (HOLDS, NOT, NOT)),
    ],
)
def test_on_a_crowded_machine_a_threshold_is_cleared_by_half_or_not_told(lo, hi, states):
    crowded = Estimate((lo + hi) / 2, lo, hi, 10, crowded="other processes took 1.5 of 2 cores")
    answers = crowded.at_least(1.2), crowded.at_most(1.5), crowded.within(0.55, 5)
    assert tuple(a.state for a in answers) == states
    assert all(("other processes" in a.seen) == (a.state == CANNOT) for a in answers)


def test_the_interval_contains_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = sum(lo <= 0 <= hi for _, lo, hi in (interval(rng.standard_t(3, 12)) for _ in range(400)))
    assert 0.92 <= inside / 400 <= 0.99


@pytest.mark.parametrize(
    ("lo", "hi", "states"),
    [
        (1.3, 1.4, (HOLDS, NOT, HOLDS)),
        (1.1, 1.3, (CANNOT, CANNOT, HOLDS)),
        (1.01, 1.015, (NOT, HOLDS, NOT)),
        (0.9, 1.1, (NOT, HOLDS, CANNOT)),
    ],
)
def test_a_finding_has_three_values(lo, hi, states):
    e = Estimate((lo + hi) / 2, lo, hi, 10)
    assert (e.at_least(1.2).state, e.at_most(1.2).state, e.differs().state) == states


@pytest.mark.parametrize(("lo", "hi", "state"), [(0.95, 1.05, HOLDS), (0.85, 1.05, CANNOT), (1.85, 2.05, NOT)])
def test_within_is_decided_only_by_the_whole_interval(lo, hi, state):
    assert Estimate((lo + hi) / 2, lo, hi, 9).within(0.9, 1.1).state == state


@pytest.mark.parametrize(
    ("a", "b", "both", "either"),
    [(HOLDS, CANNOT, CANNOT, HOLDS), (CANNOT, NOT, NOT, CANNOT), (HOLDS, HOLDS, HOLDS, HOLDS), (NOT, NOT, NOT, NOT)],
)
def test_findings_combine_as_kleene_said(a, b, both, either):
    a, b = Finding(a, "a"), Finding(b, "b")
    assert ((a & b).state, (a | b).state) == (both, either)
    assert (~~a).state == a.state and ((~a).state == CANNOT) == (a.state == CANNOT)


def test_a_finding_is_no_boolean():
    with pytest.raises(TypeError, match="three values"):
        bool(Finding(HOLDS, "a"))


def test_a_count_is_exact_and_a_timed_figure_equals_nothing():
    assert Estimate.count(3, "kernels").equals(3).state == HOLDS
    assert Estimate.count(3, "kernels").equals(4).state == NOT
    with pytest.raises(ValueError, match="within"):
        Estimate.of([1.0] * 9, "time").equals(1)


def test_what_is_missing_cannot_tell_and_says_why():
    gone = Estimate.missing("x", "64 was not measured: out of memory").at_least(1)
    assert gone.state == CANNOT and "out of memory" in gone.seen


def test_stable_text_holds_no_timed_figure():
    e = Estimate.of([0.123] * 8, "time_s of a", "s")
    assert "123" not in repr(e) + repr(e.at_most(0.2)) and "123" in str(e)
