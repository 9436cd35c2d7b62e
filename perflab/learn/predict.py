"""A guess before the measurement: a slider with a lock, and both on one axis afterwards."""

import math
import statistics

import ipywidgets as widgets

from perflab.bench import record
from perflab.bench.estimate import Estimate
from perflab.bench.units import digits
from perflab.errors import PerflabError
from perflab.show.canvas import times
from perflab.show.forms import Value, reveal
from perflab.show.style import Picture
from perflab.show.table import InsteadOfFigure


def predict(question: str, low: float, high: float, unit: str = "") -> "Prediction":
    """Ask for a guess between `low` and `high`. A guess that was locked in an earlier session stays locked.

    Raises PerflabError unless low < high.

    >>> predict("Images a second?", 0, 100)
    Prediction(Images a second? 0 to 100)
    """
    return Prediction(question, low, high, unit)


class Prediction:
    """The slider, its lock, and the learner's locked guess, if there is one."""

    def __init__(self, question: str, low: float, high: float, unit: str):
        if not low < high:
            raise PerflabError(f"predict needs low < high, not {low:g} and {high:g}.")
        self.question, self.low, self.high, self.unit = question, low, high, unit
        self.log = low > 0 and high / low >= 20
        if self.log:  # a slider begins at its end: a middle would be a hint
            kind, first, last = widgets.FloatLogSlider, math.log10(low), math.log10(high)
        else:
            kind, first, last = widgets.FloatSlider, low, high
        self.slider = kind(low, min=first, max=last, step=(last - first) / 200, readout_format=".3g")
        self.slider.layout.width = "420px"
        self.lock = widgets.Button(description="Lock my guess", icon="lock")
        self.lock.add_class("perflab-lock")
        self.lock.on_click(lambda _: self._lock())
        row = widgets.HBox([self.slider, widgets.Label(unit), self.lock])
        self.box = widgets.VBox([widgets.HTML(f"<b>{question}</b>"), row])
        self.box.add_class("perflab-predict")
        self.guess: float | None = None
        if earlier := next(record.entries("predictions", question), None):
            self._set(earlier["guess"])

    def _lock(self):
        if self.guess is None:
            self._set(self.slider.value)
            record.append("predictions", self.question, {"guess": self.guess, "unit": self.unit})

    def _set(self, guess: float):
        self.guess = min(self.high, max(self.low, guess))
        self.slider.value = self.guess
        self.slider.disabled = self.lock.disabled = True
        self.lock.description = "Locked"

    def reveal(self, measured: Estimate, bound: float | None = None) -> "Picture | InsteadOfFigure":
        """The guess, the bound and the measurement on one axis; without a locked guess, one line of text.

        A locked guess is kept with the truth, once, for `calibration()`.
        """
        where = "measured here" if measured.source == "here" else f"recorded on {measured.source}"
        limits = f", at most {digits(bound)} by the bound" if bound is not None and math.isfinite(bound) else ""
        if self.guess is None or measured.why:
            answer = f"{measured}, {where}{limits}. No guess was locked."
            return InsteadOfFigure(f"Reveal: {self.question}", f"{self.question} {measured.why or answer}")
        known = math.isfinite(measured.lo + measured.hi)  # a centre without an interval is no truth
        if known and measured.source == "here" and not any(record.entries("reveals", self.question)):
            record.append("reveals", self.question, {"guess": self.guess, "truth": measured.mid})
        return reveal(
            self.question,
            _distance(self.guess, measured),
            self.guess,
            Value(measured.mid, measured.lo, measured.hi),
            bound=bound if limits else None,
            text=times if self.unit == "times" else lambda x: f"{digits(x)} {self.unit}".rstrip(),
            log=self.log,
            note=f"{where.capitalize()}. Thin line: 95 % interval.",
        )

    def __repr__(self):
        return f"Prediction({self.question} {self.low:g} to {self.high:g} {self.unit})".replace(" )", ")")

    def _repr_mimebundle_(self, include=None, exclude=None):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(self)}


def _distance(guess: float, measured: Estimate) -> str:
    """How far off a guess was, in words."""
    if measured.lo <= guess <= measured.hi:
        return "Your guess lies within the interval."
    side = "high" if guess > measured.mid else "low"
    if guess <= 0 or measured.mid <= 0:
        return f"Your guess was too {side}."
    off = max(guess / measured.mid, measured.mid / guess)
    return (
        f"Your guess was {digits(off)} times too {side}."
        if off >= 1.995
        else f"Your guess was {off - 1:.0%} too {side}."
    )


def calibration() -> str:
    """How far this learner's locked guesses were off, over the course.

    >>> calibration()
    'No locked guess has met its measurement yet.'
    """
    pairs = [(e["guess"], e["truth"]) for e in record.entries("reveals")]
    pairs = [(g, t) for g, t in pairs if g > 0 and t > 0]
    if not pairs:
        return "No locked guess has met its measurement yet."
    factor = statistics.median(max(g / t, t / g) for g, t in pairs)
    high = sum(g > t for g, t in pairs)
    return f"{len(pairs)} locked guesses: off by a factor of {digits(factor)} in the median, {high} of them too high."
