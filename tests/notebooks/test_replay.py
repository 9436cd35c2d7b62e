"""The committed notebooks say what the recorded results say, to the byte, and their explorers draw."""

import json

import pytest
from run import TEST_TIMEOUT_S, add_cell, differing

from perflab.course.form import as_text, normalise, read
from perflab.course.kernel import cell_name, run
from perflab.course.replay import replay_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

REDRAW_LIMIT_S = 1.0  # of processor time, which a busy machine leaves as it is

SWEEP = """
import gc, json, time
from perflab.show.explorer import Explorer

def settings(control):
    low, high = getattr(control, "min", None), getattr(control, "max", None)
    if low is not None and high is not None:
        pair = isinstance(control.value, tuple)
        return [(low, high), (low, low), (high, high)] if pair else [low, high]
    if hasattr(control, "_options_full"):
        return [value for _, value in control._options_full]
    return [True, False]

drawn = []  # the type is asked, and not the thing: isinstance wakes up lazy objects that warn
for explorer in [thing for thing in gc.get_objects() if issubclass(type(thing), Explorer)]:
    for name, control in explorer.controls.items():
        if not hasattr(control, "value"):
            continue
        first = control.value
        for value in [*settings(control), first]:
            start = time.thread_time()
            control.value = value
            drawn.append([name, repr(value), time.thread_time() - start, repr(explorer.error or "")])

from perflab.show.canvas import collisions, finished

figures = [wrong for figure in finished if (wrong := collisions(figure))]
print(json.dumps([drawn, figures]))
"""


def test_a_replay_gives_the_committed_bytes_no_text_of_a_figure_collides_and_explorers_draw(notebook, tmp_path, note):
    nb = add_cell(read(notebook), SWEEP)
    run(nb, notebook, replay_env(tmp_path))
    drawn, collisions = json.loads(nb.cells.pop().outputs[-1].text)
    again = normalise(nb)
    names = [cell_name(again, index) for index in differing(read(notebook), again)]
    assert as_text(again) == notebook.read_text("utf-8"), f"this replay differs in {names}; run `make notebooks`"
    assert collisions == []
    assert not [(name, value, error) for name, value, _, error in drawn if error != "''"]
    slowest = max((seconds for _, _, seconds, _ in drawn), default=0)
    note(f"{notebook.stem}: explorers redrawn {len(drawn)} times, slowest {slowest:.2f} s")
    assert slowest < REDRAW_LIMIT_S


def test_the_normal_form_of_a_normal_form_is_itself(notebook):
    assert as_text(normalise(normalise(read(notebook)))) == as_text(normalise(read(notebook)))
