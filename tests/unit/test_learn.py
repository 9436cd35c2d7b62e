"""Claims, predictions, questions: what they keep, what they say, that they never raise at a learner."""

import json
import math
import re

import nbformat
import numpy as np
import pytest
import torch

from perflab import PerflabError, calibration, card, judge, paths, predict, question, say
from perflab.bench import record
from perflab.bench.estimate import HOLDS, NOT, Estimate
from perflab.exercises import problems
from perflab.learn.claims import ledger
from perflab.learn.question import as_number

YES = Estimate(2, 1.9, 2.1, 9, "ratio").at_least(1.2)


def notebooks():
    return {p.stem: nbformat.read(p, 4) for p in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}


def code(nb) -> str:
    return "\n".join(c.source for c in nb.cells if c.cell_type == "code")


def test_every_claim_is_judged_in_its_one_notebook_or_says_why_not():
    for c in ledger().values():
        assert bool(c.judged) != bool(c.untested), c.id
        judges = [stem for stem, nb in notebooks().items() if f'judge("{c.id}"' in code(nb)]
        assert judges == ([c.notebook] if c.judged else []), c.id


def test_every_judged_claim_is_in_the_ledger():
    named = {id for nb in notebooks().values() for id in re.findall(r'judge\("([^"]+)"', code(nb))}
    assert named <= set(ledger())


def test_a_verdict_is_kept_and_stands_on_the_card():
    judge("C1-3", YES)
    (entry,) = record.entries("verdicts")
    assert entry["claim"] == "C1-3" and entry["state"] == HOLDS
    rows = {row["claim"]: row["verdict"] for row in card().rows()}
    assert rows["C1-3"] == HOLDS and rows["C1-6"] == "TEXT ONLY" and rows["C1-1"] == "not judged yet"


def test_a_timed_verdict_shows_no_figure_in_stable_text():
    v = judge("C1-3", YES)
    assert repr(v) == "judged C1-3 (timed): ratio at least 1.2"
    assert "HOLDS HERE" in str(v) and "What is right" in v.html()


def test_a_recorded_verdict_does_not_say_here():
    v = judge("C1-3", Estimate(2, 1.9, 2.1, 9, "ratio", source="some-gpu").at_least(1.2))
    assert v.state == "HOLDS ON some-gpu"


def test_an_exact_verdict_is_stable_text():
    v = judge("C1-3", Estimate.count(3, "kernels").equals(4))
    assert repr(v) == "judged C1-3 (DOES NOT HOLD): kernels equal to 4" and v.finding.state == NOT


@pytest.mark.parametrize(
    ("id", "finding", "word"),
    [("C1-99", YES, "C1-1"), ("X", YES, "ledger"), ("C1-6", YES, "advice"), ("C1-3", True, "at_least")],
)
def test_a_wrong_call_of_judge_is_one_sentence(id, finding, word):
    with pytest.raises(PerflabError, match=word):
        judge(id, finding)


def test_a_guess_is_locked_once_and_stays_locked():
    p = predict("How many?", 1, 10, "times")
    p.slider.value = 4
    p.lock.click()
    p.lock.click()
    again = predict("How many?", 1, 10, "times")
    assert again.guess == 4 and again.slider.disabled
    assert len(list(record.entries("predictions"))) == 1


def test_reveal_blocks_nothing_and_keeps_a_locked_guess_once():
    truth = Estimate(2, 1.9, 2.1, 9, "ratio")
    predict("A?", 1, 10).reveal(truth)
    assert "No locked guess" in calibration()
    p = predict("B?", 1, 100)
    p.slider.value = 10
    p.lock.click()
    for _ in range(2):
        assert p.reveal(truth, bound=3, beside={"some-gpu": truth}).data[:4] == b"\x89PNG"
    assert calibration().startswith("1 locked guesses: off by a factor of 5.00")


def test_reveal_of_nothing_draws_all_the_same():
    assert predict("C?", 1, 10).reveal(Estimate.missing("x", "no GPU")).data


def test_a_guess_needs_a_range():
    with pytest.raises(PerflabError, match="low < high"):
        predict("D?", 3, 3)


@pytest.mark.parametrize("id", problems())
def test_a_question_left_alone_says_not_yet(id):
    q = question(id)
    assert q.check().state == q.check(...).state == q.check(None).state == "Not yet"
    assert q.hint().state.startswith("Hint 1") and q.problem.solution


def test_an_unknown_question_names_those_there_are():
    with pytest.raises(PerflabError, match=r"00\.1"):
        question("99.9")


def test_amdahl():
    q = question("00.1")
    assert q.check(eval(q.problem.solution)).state == "Correct"
    for wrong in (2, 1 / 0.65, 17, "1.2", True):
        outcome = q.check(wrong)
        assert outcome.state == "Not right" and outcome.sentence


@pytest.mark.timed
def test_prefetching_right_and_wrong():
    q = question("00.2")
    scope: dict = {}
    exec(q.problem.solution, scope)
    assert q.check(scope["prefetched"]).state in ("Correct", "CANNOT TELL")

    def swallows(loader):
        try:
            yield from loader
        except RuntimeError:
            return

    wrong = {
        "iterable of batches": lambda loader: 3,
        "in order": lambda loader: reversed(list(loader)),
        "whole": lambda loader: list(loader)[:-1],
        "swallows": swallows,
        "in turn": iter,
        "raised ZeroDivisionError": lambda loader: 1 / 0,
        "function": 7,
    }
    for word, answer in wrong.items():
        outcome = q.check(answer)
        assert outcome.state in ("Not right", "CANNOT TELL"), word
        assert word in outcome.sentence or outcome.state == "CANNOT TELL" or word == "iterable of batches"


@pytest.mark.parametrize(
    ("sentence", "plain"),
    [
        ("An epoch takes 1.44 s (1.21 to 1.71).", "An epoch takes # (# to #)."),
        ("An epoch takes 1.44 s (no interval from 3 rounds).", "An epoch takes # (# to #)."),
        ("C1-1 of 1080p: 364 images/s, 94% of it.", "C1-1 of 1080p: #, # of it."),
        ("2.00 GiB at 1,230 GB/s", "# at #"),
    ],
)
def test_said_figures_are_left_out_of_stable_text(sentence, plain, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    say(sentence)
    assert shown[0]["text/plain"] == plain and sentence in shown[0]["text/html"]


def test_recorded_verdicts_cannot_tell_in_at_most_one_of_ten():
    states = [
        word
        for nb in notebooks().values()
        for c in nb.cells
        for o in c.get("outputs", [])
        for word in re.findall(r"<b style=[^>]*>(HOLDS|DOES NOT HOLD|CANNOT TELL)", json.dumps(o).replace('\\"', '"'))
    ]
    assert states and states.count("CANNOT TELL") <= len(states) / 10


@pytest.mark.parametrize("answer", ["8", True, [8], None, {}, 1j, float("nan")])
def test_what_is_no_number_is_nan(answer):
    assert math.isnan(as_number(answer))


def test_numbers_of_any_kind_are_numbers():
    assert [as_number(x) for x in (8, 8.0, np.float32(8), torch.tensor(8), float("inf"))] == [8, 8, 8, 8, math.inf]
