"""A guess before the measurement: a slider with a lock, and both on one axis afterwards."""

import math
import statistics
from collections.abc import Mapping

import ipywidgets as widgets

from perflab.bench import record
from perflab.bench.estimate import LEAST, Estimate
from perflab.bench.units import digits
from perflab.errors import PerflabError
from perflab.show import style


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
        if self.log:
            kind, first, last, start = widgets.FloatLogSlider, math.log10(low), math.log10(high), math.sqrt(low * high)
        else:
            kind, first, last, start = widgets.FloatSlider, low, high, (low + high) / 2
        self.slider = kind(start, min=first, max=last, step=(last - first) / 200, readout_format=".3g")
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

    @style.styled
    def reveal(
        self,
        measured: Estimate,
        bound: float | None = None,
        beside: Mapping[str, Estimate] | None = None,
    ) -> style.Picture:
        """Guess, bound and measurement on one axis; recorded machines in grey. Blocks nothing, locked or not.

        A locked guess is kept with the truth, once, for `calibration()`.
        """
        known = math.isfinite(measured.lo + measured.hi)  # a centre without an interval is no truth
        answered = known and measured.source == "here" and self.guess is not None
        if answered and not any(record.entries("reveals", self.question)):
            record.append("reveals", self.question, {"guess": self.guess, "truth": measured.mid})
        estimates = {"measured here" if measured.source == "here" else measured.source: measured} | dict(beside or {})
        points = {name: e for name, e in estimates.items() if not e.why}
        fig = self._drawn(points, bound if bound is not None and math.isfinite(bound) else None, measured.why)
        bounded = ", the bound dashed" if bound is not None else ""
        return style.Picture.of(fig, f"{self.question} The guess and the measurement on one axis{bounded}.")

    def _drawn(self, points: Mapping[str, Estimate], bound: float | None, why: str):
        """The figure of points by name, of guess and bound where there are any, and of why nothing was measured."""
        fig, ax = style.figure(height=2.1)
        height = max(1, len(points))
        for y, (name, e) in enumerate(points.items()):
            _point(ax, y, name, e, self.unit)
        if self.guess is not None:
            ax.plot([self.guess], [0], "D", color=style.PARTS[1], markersize=8)
            text = f"your guess: {digits(self.guess)}"
            ax.annotate(text, (self.guess, 0), (0, -16), textcoords="offset points", ha="center")
        if bound is not None:
            ax.axvline(bound, color=style.BOUND, linestyle="--")
            ax.annotate(f" bound {digits(bound)}", (bound, height - 0.35), color=style.BOUND, fontsize=9, va="top")
        if self.log:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        marks = [e.mid for e in points.values()] + [x for x in (bound, self.guess) if x is not None]
        low, high = min([self.low, *marks]), max([self.high, *marks])
        ax.set_xlim((low / 1.3, high * 1.3) if self.log else (low, high + 0.05 * (high - low)))
        ax.set_ylim(-0.7, height - 0.3)
        ax.set_yticks([])
        ax.set_xlabel(f"{self.question} {f'({self.unit})' if self.unit else ''}".strip())
        if why:
            ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", color=style.RECORDED, fontsize=9)
        if self.guess is None:
            ax.set_title("no guess was locked", color=style.RECORDED, fontsize=9)
        return fig

    def __repr__(self):
        return f"Prediction({self.question} {self.low:g} to {self.high:g} {self.unit})".replace(" )", ")")

    def _repr_mimebundle_(self, include=None, exclude=None):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(self)}


def _point(ax, y: int, name: str, e: Estimate, unit: str):
    """One estimate in its row, with its interval where it has one; a recorded machine's in grey."""
    colour = style.HERE if name == "measured here" else style.RECORDED
    spread = [[e.mid - e.lo], [e.hi - e.mid]] if math.isfinite(e.lo + e.hi) else None
    ax.errorbar([e.mid], [y], xerr=spread, fmt="o", color=colour, capsize=4)
    yet = "" if e.exact or e.n >= LEAST else ", no interval yet"
    text = f"{name}: {digits(e.mid)} {unit}".rstrip() + yet
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    ax.annotate(text, (e.mid, y), (0, 7), textcoords="offset points", color=colour, ha="center", bbox=plate)


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
