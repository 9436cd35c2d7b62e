"""The one figure style: colours that colour-blind readers can tell apart, sizes, and the way to a PNG."""

import base64
import io
from dataclasses import dataclass

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette; grey is kept for recorded machines, vermilion for bounds.
HERE, RECORDED, BOUND = "#0072B2", "#7a7a7a", "#D55E00"
PARTS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"]
DPI = 72  # of the size on the page; the file holds twice as many pixels

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


styled = matplotlib.rc_context(STYLE)  # decorates every function that draws


def figure(width: float = 8.0, height: float = 3.4, layout: str | None = "constrained"):
    """A figure of `width` x `height` inches with one Axes, outside pyplot: widgets may draw from any thread."""
    fig = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(fig)
    return fig, fig.add_subplot()


def key(ax, colours: dict[str, str]):
    """What each colour means, below the axes at the right."""
    swatches = [ax.barh(0, 0, color=colour) for colour in colours.values()]
    ax.legend(swatches, colours, ncols=len(colours), loc="upper right", bbox_to_anchor=(1, -0.08))


def png(fig: Figure) -> bytes:
    """The figure as PNG, the same bytes for the same content."""
    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=2 * DPI, metadata={"Software": None}, pil_kwargs={"compress_level": 3})
    return file.getvalue()


@dataclass(frozen=True)
class Picture:
    """A drawn figure with its alternative text.

    `text` is what a test compares, where the alternative text holds measured figures.
    """

    data: bytes
    alt: str
    width: int
    text: str = ""

    @classmethod
    def of(cls, fig: Figure, alt: str) -> "Picture":
        return cls(png(fig), alt, round(fig.get_figwidth() * DPI))

    def _repr_mimebundle_(self, include=None, exclude=None):
        shown = {"image/png": base64.b64encode(self.data).decode("ascii"), "text/plain": repr(self)}
        return shown, {"image/png": {"width": self.width, "alt": self.alt}}

    def __repr__(self):
        return f"Figure: {self.text or self.alt}"
