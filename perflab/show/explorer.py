"""Knobs and one redrawn figure. A slider replays what was measured or evaluates a model; it never measures."""

import base64
import html
import threading
from collections.abc import Callable

import ipywidgets as widgets

from . import style

VIEW = "application/vnd.jupyter.widget-view+json"


class Explorer:
    """`draw(ax, **values) -> caption` fills one Axes from the values of the controls.

    The picture is an Image whose bytes are replaced: no output is cleared, so nothing flickers, and a
    file without a kernel still shows it. Callbacks may come from another thread (ipykernel's subshells),
    so drawing is locked and stays outside pyplot. An error is shown in the caption and kept in `error`.
    """

    def __init__(
        self,
        draw: Callable[..., str],
        alt: str,
        size: tuple[float, float] = (8.0, 3.4),
        **controls: widgets.ValueWidget,
    ):
        self.draw, self.alt, self.controls, self.error = draw, alt, controls, None
        self.size = size
        self.width = round(size[0] * style.DPI)
        self.image = widgets.Image(format="png", layout=widgets.Layout(width=f"{self.width}px", max_width="100%"))
        self.caption = widgets.HTML()
        row = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self.box = widgets.VBox([row, self.image, self.caption])
        self.box.add_class("perflab-explorer")
        self._lock = threading.RLock()
        self._start = self.values
        for control in controls.values():
            control.style.description_width = "initial"
            control.observe(self._changed, "value")
        self.redraw()

    @property
    def values(self) -> dict:
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, _):
        self.redraw()

    @style.styled
    def redraw(self):
        with self._lock:
            fig, self.ax = style.figure(*self.size, layout=None)  # a computed layout would double the time
            fig.subplots_adjust(left=0.09, right=0.98, bottom=0.15, top=0.84)
            try:
                text = html.escape(self.draw(self.ax, **self.values) or "")
                self.error = None
            except Exception as e:  # in a callback it would be lost to the log
                self.ax.clear()
                self.ax.set_axis_off()
                self.error, text = e, f"<b>{type(e).__name__}</b>: {html.escape(str(e))}"
            self.image.value = style.png(fig)
            self.caption.value = text

    def __repr__(self):
        knobs = ", ".join(f"{name}={_described(c, self._start[name])}" for name, c in self.controls.items())
        return f"Explorer({knobs}): {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        picture = base64.b64encode(self.image.value).decode("ascii")
        shown = {VIEW: view, "image/png": picture, "text/plain": repr(self)}
        return shown, {"image/png": {"width": self.width, "alt": self.alt}}


def _described(control: widgets.ValueWidget, start) -> str:
    """A control as stable text: where it starts and what it can be set to."""
    if options := getattr(control, "options", None):
        return f"{start!r} of {list(options)!r}"
    if hasattr(control, "min"):
        return f"{start!r} in {control.min!r}..{control.max!r}"
    return repr(start)
