"""Claims, predictions, questions: what they keep, what they say, that they never raise at a learner."""

import json
import math
import re
from collections import Counter

import nbformat
import numpy as np
import pytest
import torch

from perflab import PerflabError, calibration, card, judge, paths, predict, question, say
from perflab.bench import record
from perflab.bench.estimate import HOLDS, Estimate
from perflab.exercises import problems
from perflab.learn.claims import ledger
from perflab.learn.question import as_number

YES = Estimate(2, 1.9, 2.1, 9, "ratio").at_least(1.2)


def notebooks():
    return {p.stem: nbformat.read(p, 4) for p in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}


def code(nb) -> str:
    return "\n".join(c.source for c in nb.cells if c.cell_type == "code")


def test_every_judged_claim_is_in_the_ledger():
    named = {id for nb in notebooks().values() for id in re.findall(r'judge\("([^"]+)"', code(nb))}
    assert named and named <= set(ledger())


def test_the_ledger_has_all_statements_of_the_source():
    kinds = {"fact", "number", "advice", "possibility", "anecdote", "definition", "listing"}
    assert len(ledger()) == 155
    for claim in ledger().values():
        assert claim.id.startswith(f"C{claim.section}-") and claim.kind in kinds and claim.notebook < "14", claim.id


def test_a_claim_has_a_fair_test_or_says_why_not():
    for claim in ledger().values():
        assert bool(claim.fair_test) != bool(claim.why_not), claim.id


def test_a_boxed_claim_advises_in_at_most_twenty_words():
    for claim in ledger().values():
        assert bool(claim.so) == claim.box and len(claim.so.split()) <= 20, claim.id
        assert claim.testable or not claim.box, claim.id


def test_a_notebook_has_at_most_six_boxes():
    boxes = Counter(claim.notebook for claim in ledger().values() if claim.box)
    numbers = {stem[:2] for stem in notebooks()}
    assert {number for number in boxes if number <= "06"} <= numbers and max(boxes.values()) <= 6


def test_the_ledger_says_everything_once_and_in_english():
    texts = [text for c in ledger().values() for text in (c.says, c.right, c.fair_test, c.why_not, c.so)]
    sentences = Counter(sentence for text in texts for sentence in re.split(r"(?<=[.?!])\s+", text) if sentence)
    assert [sentence for sentence, times in sentences.items() if times > 1] == []
    assert "".join(texts).isascii()


def test_a_verdict_is_kept_and_stands_on_the_card():
    judge("C2.3-5", YES)
    (entry,) = record.entries("verdicts")
    assert entry["claim"] == "C2.3-5" and entry["state"] == HOLDS
    verdicts = dict(zip(ledger(), (row["verdict"] for row in card().rows()), strict=True))
    assert verdicts["C2.3-5"] == HOLDS
    assert verdicts["C1-6"] == "NOT TESTABLE" and verdicts["C1-5"] == "not judged yet"


COUNT = Estimate.count(3, "kernels")
ELSEWHERE = Estimate(2, 1.9, 2.1, 9, "ratio", source="some-gpu")


@pytest.mark.parametrize(
    ("finding", "part", "stable", "state", "words"),
    [
        (YES, None, "timed", "HOLDS HERE", "Holds on this machine: 2"),
        (~YES, YES, "timed", "HOLDS IN PART", "Holds in part on this machine"),
        (~YES, ~YES, "timed", "DOES NOT HOLD HERE", "Does not hold on this machine"),
        (ELSEWHERE.at_least(1.2), None, "timed", "HOLDS ON some-gpu", "Holds on some-gpu"),
        (ELSEWHERE.at_least(2), YES, "timed", "CANNOT TELL ON some-gpu", "Cannot tell on some-gpu"),
        (COUNT.equals(3), None, "HOLDS", "HOLDS", "True: 3."),
        (COUNT.equals(4), None, "DOES NOT HOLD", "DOES NOT HOLD", "Not true: 3."),
        (COUNT.equals(4), COUNT.equals(3), "HOLDS IN PART", "HOLDS IN PART", "Partly true: 3; 3."),
    ],
)
def test_a_verdict_says_in_words_what_was_measured(finding, part, stable, state, words):
    verdict = judge("C2.3-5", finding, part)
    assert repr(verdict).startswith(f"judged C2.3-5 ({stable}): {finding.rule}")
    assert str(verdict).startswith(f"C2.3-5 {state}: ") and f"<b>Measured</b> {words}" in verdict.html()


def test_a_box_ends_with_advice_and_shows_no_id_and_no_rule():
    shown = re.sub("<[^>]*>", " ", judge("C2.3-4", YES).html())
    assert ledger()["C2.3-4"].so in shown and "C2.3-4" not in shown and "at least 1.2" not in shown
    assert ledger()["C2.3-5"].right in judge("C2.3-5", YES).html()  # without a box of its own


def test_what_is_not_testable_gets_no_verdict():
    verdict = judge("C1-3", COUNT.equals(4))
    assert repr(verdict) == "judged C1-3 (DOES NOT HOLD): kernels equal to 4"
    assert "Not testable:" in verdict.html() and "Not true" not in verdict.html()
    assert not list(record.entries("verdicts"))


def test_an_unknown_claim_is_one_sentence():
    with pytest.raises(PerflabError, match=r"C1-99: data/claims\.toml"):
        judge("C1-99", YES)


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
    assert "No guess was locked" in str(predict("A?", 1, 10).reveal(truth, bound=3))
    assert "No locked guess" in calibration()
    p = predict("B?", 1, 100)
    p.slider.value = 10
    p.lock.click()
    for _ in range(2):
        assert p.reveal(truth, bound=3).data[:4] == b"\x89PNG"
    assert calibration().startswith("1 locked guesses: off by a factor of 5.00")


def test_reveal_of_nothing_says_why():
    assert "no GPU" in str(predict("C?", 1, 10).reveal(Estimate.missing("x", "no GPU")))


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
        for word in re.findall(r"<b>Measured</b> (\w+)", json.dumps(o))
    ]
    assert states and states.count("Cannot") <= len(states) / 10


@pytest.mark.parametrize("answer", ["8", True, [8], None, {}, 1j, float("nan")])
def test_what_is_no_number_is_nan(answer):
    assert math.isnan(as_number(answer))


def test_numbers_of_any_kind_are_numbers():
    assert [as_number(x) for x in (8, 8.0, np.float32(8), torch.tensor(8), float("inf"))] == [8, 8, 8, 8, math.inf]
