"""The forms of figures under hard inputs: no text collides, leaves the card, or is too small."""

import itertools
import random

import pytest

from perflab.show import forms
from perflab.show.canvas import LINES, MEANS, collisions, finished, spread, ticks, times
from perflab.show.forms import Lane, Line, Row, Rung, Value

LONG = "a name that somebody has chosen without any thought of room"
KINDS = ("waiting for data", "copy", "host", "GPU busy")


def _number(dice):
    return 10 ** dice.uniform(-3, 7)


def _rows(dice, n, **more):
    rows = []
    for k in range(n):
        x = _number(dice)
        value = Value(x, 0.8 * x, x * dice.uniform(1, 1.6))
        rows.append(Row(LONG[: dice.randint(3, 32)], value, f"{x:,.3g} images/s", times(x), **more | {"bound": 2 * x}))
        if k % 2:
            rows[-1] = rows[-1]._replace(other=Value(_number(dice)), other_text="1,234 there")
    return rows


def _comparison(dice, words):
    rows = _rows(dice, dice.randint(1, 8))
    key = {LONG[:30]: "#0072B2", LONG: "#D55E00"}
    return forms.comparison(*words, rows, note="a note", side="speed", ratio=dice.random() < 0.5, key=key)


def _groups(dice, words):
    rows = [row._replace(group=f"group {k // 2}") for k, row in enumerate(_rows(dice, 6))]
    return forms.comparison(*words, rows, whole=max(row.value.mid for row in rows))


def _ladder(dice, words):
    rungs = []
    for _ in range(dice.randint(1, 9)):
        x = _number(dice)
        share = dice.choice([None, 0.02, 0.44, 0.97])
        rungs.append(Rung(LONG[: dice.randint(3, 30)], Value(x), f"{x:,.3g}", _number(dice), times(x), share))
    return forms.ladder(*words, rungs, share="GPU busy", limit="the model alone")


def _parts(dice, words):
    rows = {LONG[: 5 + 9 * k]: {kind: abs(dice.gauss(0, 1)) ** 3 + 1e-6 for kind in KINDS} for k in range(4)}
    if dice.random() < 0.5:
        totals = {name: f"{sum(row.values()):.3g} ms, {times(_number(dice))} as fast" for name, row in rows.items()}
        return forms.parts(*words, rows, totals=totals, text=lambda x: f"{x:.3g} ms")
    shares = {name: {kind: x / sum(row.values()) for kind, x in row.items()} for name, row in rows.items()}
    return forms.parts(*words, shares)


def _curve(dice, words):
    lines = []
    for k in range(dice.randint(1, 6)):
        points = [(2.0**i, Value(_number(dice))) for i in range(1 if k == 3 else 6)]
        lines.append(Line(LONG[: dice.randint(4, 58)], points, LINES[k % 5], limit=k == 4))
    marks = [(4.0, "first knee here"), (5.0, "second knee"), (32.0, "last")]
    log = dice.random() < 0.5
    return forms.curve(*words, lines, "batch", "time (us)", log_x=log, log_y=not log, marks=marks)


def _lanes(dice, words):
    starts = [dice.uniform(0, 90) for _ in range(60)]
    spans = [(start, start + dice.uniform(0, 20), dice.choice(KINDS)) for start in starts]
    texts = [(a, b, kind) for a, b, kind in spans[:1]]
    rows = [Lane(LONG[: 3 + 6 * k], spans, f"group {k // 2}", texts, (100, "123 ms")) for k in range(5)]
    return forms.lanes(*words, rows, 120, launches=[(10, 0, 30, 1)])


def _reveal(dice, words):
    bound = dice.choice([None, _number(dice)])
    return forms.reveal(*words, _number(dice), Value(_number(dice)), bound=bound, log=dice.random() < 0.7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", [_comparison, _groups, _ladder, _parts, _curve, _lanes, _reveal])
def test_no_text_meets_another(form, seed):
    dice = random.Random(seed)
    words = dice.choice([("Short", "So."), (f"{LONG}, {LONG}", f"{LONG} " * 3)])
    picture = form(dice, words)
    assert collisions(finished[-1]) == [] and picture.data[:4] == b"\x89PNG"


def test_the_same_content_gives_the_same_bytes():
    rows = [Row("one", Value(1.0), "1 s"), Row("two", Value(2.0), "2 s")]
    first, second = (forms.comparison("A title", "A sentence.", rows).data for _ in range(2))
    assert first == second


def test_what_is_compared_is_stable_text_and_what_was_seen_is_heard():
    picture = forms.parts("Where a step goes", "61 % is waiting.", {"": {"waiting for data": 0.61, "GPU busy": 0.39}})
    assert repr(picture) == "Figure: Where a step goes"
    assert "61 % is waiting" in picture.alt and "GPU busy 39%" in picture.alt
    assert set(MEANS) >= {"waiting for data", "GPU busy"}


def test_what_is_spread_keeps_its_order_and_does_not_overlap():
    places = spread([1.0, 1.0, 1.05, 3.0], [0.3] * 4, 0.0, 4.0)
    assert places == sorted(places) and min(b - a for a, b in itertools.pairwise(places)) >= 0.3 - 1e-6


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [(0, 10, False, [0, 2, 4, 6, 8, 10]), (1, 100, True, [1, 2, 5, 10, 20, 50, 100])],
)
def test_ticks_are_round(low, high, log, expected):
    assert ticks(low, high, log) == expected


@pytest.mark.parametrize(("x", "text"), [(1, "1×"), (0.47, "0.47×"), (7.62, "7.6×"), (30.2, "30×"), (1160, "1,160×")])
def test_factors_have_as_many_digits_as_they_need(x, text):
    assert times(x) == text
