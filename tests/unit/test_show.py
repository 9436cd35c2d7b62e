"""Figures, tables and explorers: what they hold, that they are the same bytes twice, that they live."""

import io
import itertools
import threading
import time

import ipywidgets as widgets
import pytest
from PIL import Image

from perflab import vary
from perflab.bench.result import Result
from perflab.loading.timelines import queue
from perflab.show import figures
from perflab.show.explorer import VIEW, Explorer
from perflab.show.results import drawn


@pytest.fixture(scope="module")
def numbers():
    return _sweep([1, 2, 4])


def _sweep(values):
    return vary("ms", values, lambda ms: time.sleep(ms / 1000), study="t.show", per="image", work=2)


def _explorer():
    def draw(ax, n, kind):
        if n == 9:
            raise ValueError("nine")
        ax.plot([0, n])
        return f"n is {n}"

    return Explorer(draw, "a line.", n=widgets.IntSlider(3, min=1, max=10), kind=widgets.Dropdown(options=["a", "b"]))


def test_a_table_alone_has_no_figure(numbers):
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("IPython.display.display", lambda x, **how: shown.append(x))
        figures.display_table(numbers)
        figures.display_result(numbers)
    assert shown[0] == shown[1] and shown[0]["text/plain"] == repr(numbers)
    assert len(shown) == 3 and shown[2].data[:4] == b"\x89PNG"


def test_a_figure_is_the_same_bytes_twice_and_says_what_it_shows(numbers):
    a, b = drawn(numbers), drawn(numbers)
    assert a.data == b.data
    assert repr(a) == "Figure: Images a second by ms" and "images/s (1)" in a.alt
    shown, metadata = a._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == a.alt and "image/png" in shown
    assert Image.open(io.BytesIO(a.data)).size[0] == 2 * a.width


def test_two_values_are_no_figure_and_three_names_are_bars():
    def planted(names):
        samples = {"time_s": {name: [(r, [0.001 * (k + 1)]) for r in range(8)] for k, name in enumerate(names)}}
        return Result("t.planted", 1, "kind", list(names), samples=samples)

    assert drawn(planted("ab")) is None
    assert "c: 3.00 ms" in drawn(planted("abc")).alt


def test_the_table_has_each_value_and_the_provenance(numbers):
    html = figures.table(numbers)
    assert html.count("<tr>") == 4 and "Measured here" in html


def test_a_slider_redraws():
    e = _explorer()
    before = e.image.value
    e.controls["n"].value = 7
    assert e.ax.lines[0].get_ydata().tolist() == [0, 7] and e.caption.value == "n is 7"
    assert e.image.value != before and e.image.value[:4] == b"\x89PNG"


def test_what_a_browser_sends_redraws():
    e = _explorer()
    update = {"method": "update", "state": {"value": 8}, "buffer_paths": []}
    e.controls["n"]._handle_msg({"content": {"data": update}, "buffers": []})
    assert e.ax.lines[0].get_ydata().tolist() == [0, 8]


def test_an_error_is_shown_and_the_next_move_recovers():
    e = _explorer()
    e.controls["n"].value = 9
    assert isinstance(e.error, ValueError) and "nine" in e.caption.value
    e.controls["n"].value = 4
    assert e.error is None


def test_many_threads_may_move_sliders():
    e = _explorer()
    threads = [threading.Thread(target=setattr, args=(e.controls["n"], "value", i)) for i in (2, 4, 5, 6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert e.error is None and len(e.ax.lines) == 1


def test_the_stable_text_names_every_control_and_range():
    e = _explorer()
    e.controls["n"].value = 5
    assert repr(e) == "Explorer(n=3 in 1..10, kind='a' of ['a', 'b']): a line."
    assert set(e._repr_mimebundle_()[0]) == {VIEW, "image/png", "text/plain"}


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("step_s", [0.01, 0.2])
def test_the_modelled_time_line_reaches_the_steady_step(workers, step_s):
    spans = queue([0.08] * 60, step_s, workers)
    steps = [s.start for s in spans if s.kind == "step"]
    steady_s = max(step_s, 0.08 / workers) if workers else step_s + 0.08
    assert (steps[-1] - steps[29]) / 30 == pytest.approx(steady_s, rel=0.12)


def test_a_lane_never_does_two_things_at_once():
    spans = queue([0.12] * 12, 0.02, 3)
    for lane in {s.lane for s in spans}:
        own = sorted((s.start, s.end) for s in spans if s.lane == lane)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(own))
