"""Every explorer draws at the ends of every control, and fast enough to follow a hand."""

import json

import pytest
from run import TEST_TIMEOUT_S, add_cell

from perflab.course.form import read
from perflab.course.kernel import run
from perflab.course.replay import replay_env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

REDRAW_LIMIT_S = 1.0

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
            start = time.perf_counter()
            control.value = value
            drawn.append([name, repr(value), time.perf_counter() - start, repr(explorer.error or "")])
print(json.dumps(drawn))
"""


def test_explorers_draw_at_every_end_of_every_control(notebook, tmp_path, note):
    nb = add_cell(read(notebook), SWEEP)
    run(nb, notebook, replay_env(tmp_path))
    drawn = json.loads(nb.cells[-1].outputs[-1].text)
    if not drawn:
        pytest.skip(f"{notebook.stem} has no explorer")
    failed = [(name, value, error) for name, value, _, error in drawn if error != "''"]
    assert not failed
    slowest = max(seconds for _, _, seconds, _ in drawn)
    note(f"{notebook.stem}: explorers redrawn {len(drawn)} times, slowest {slowest:.2f} s")
    assert slowest < REDRAW_LIMIT_S
