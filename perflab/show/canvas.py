"""What a figure is drawn on: a title, a sentence, a key, the plot and a note, all of one width.

Places are inches from the left and from the top. Texts are measured before they are placed, so that none
meets another; `collisions` says where one does.
"""

import functools
import io
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator
from PIL import Image

from .style import Picture

WIDTH, EDGE, DPI, SHARP = 7.0, 0.18, 100, 2  # inches; pixels an inch on the page, and how many in the file for each
TITLE, BODY, SMALL = 12.5, 10, 9  # points
INK, SOFT, FAINT, TRACK = "#1f2328", "#59636e", "#d9dee3", "#e8ebee"
# Okabe and Ito's colours: what the figure is about, what it is compared with, another machine, a limit, a guess.
SUBJECT, BASE, OTHER, LIMIT, GUESS = "#0072B2", "#8fb3cc", "#b9c0c7", "#D55E00", "#CC79A7"
LINES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]
MEANS = {  # a stage and a cause of idle time have the same colour in every figure
    "GPU busy": "#0072B2",
    "waiting for data": "#E69F00",
    "copy": "#56B4E9",
    "host": "#CC79A7",
    "synchronise": "#3b3b3b",
    "idle": TRACK,
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": SMALL,
    "text.parse_math": False,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.labelsize": SMALL,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
}
styled = matplotlib.rc_context(STYLE)  # decorates every form
_RULER = RendererAgg(1, 1, DPI)
finished: deque[Figure] = deque(maxlen=100)  # the latest figures, for `collisions`


@functools.cache
def width(text: str, size: float = SMALL, weight: str = "normal") -> float:
    """The width of a text in inches."""
    font = FontProperties(family=STYLE["font.family"], size=size, weight=weight)
    return _RULER.get_text_width_height_descent(text, font, False)[0] / DPI


def wrapped(text: str, room: float, size: float = SMALL, weight: str = "normal") -> list[str]:
    """The text in lines no wider than `room` inches; a number stays with its unit."""
    lines: list[str] = []
    for word in re.sub(r"(?<=\d) (?=\S{1,4}\b)", "\xa0", text).split(" "):
        if lines and width(f"{lines[-1]} {word}", size, weight) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres near the wanted ones, in the same order, so that things of these sizes do not overlap in low..high."""
    order = np.argsort(wanted, kind="stable")
    half = np.asarray(sizes, float)[order] / 2
    centres = np.asarray(wanted, float)[order]
    least = np.append(0, half[:-1] + half[1:])  # distance from the one before
    for _ in range(200):  # neighbours that overlap move apart by half each, again and again
        gap = np.diff(centres) - least[1:]
        push = np.clip(-gap, 0, None) / 2
        centres[:-1] -= push
        centres[1:] += push
        centres = np.clip(centres, low + half, np.maximum(high - half, low + half))
    for i in range(1, len(centres)):  # what is left of an overlap, downwards
        centres[i] = max(centres[i], centres[i - 1] + least[i])
    placed = np.empty(len(centres))
    placed[order] = centres
    return placed.tolist()


class Canvas:
    """A figure with a plot of `height` inches, `head` above and `foot` below it for what belongs to its axes."""

    def __init__(self, height, title, sentence, note="", key: Mapping[str, str] | None = None, head=0.0, foot=0.05):
        room, key = WIDTH - 2 * EDGE, key or {}
        titles, notes = wrapped(title, room, TITLE, "bold"), wrapped(note, room) if note else []
        said = _balanced(sentence, room)
        keys = _key_rows(key, room)
        self.top = 0.26 + 0.24 * len(titles) + 0.2 * len(said) + head + (0.08 + 0.22 * len(keys) if key else 0)
        self.bottom = self.top + height
        self.height = self.bottom + foot + 0.19 * len(notes) + 0.18
        self.fig = Figure(figsize=(WIDTH, self.height), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.fig)
        self.title, self.sentence = title, sentence
        for k, line in enumerate(titles):
            self.put(EDGE, 0.14 + 0.24 * k, line, size=TITLE, weight="bold", va="top")
        for k, line in enumerate(said):
            self.put(EDGE, 0.16 + 0.24 * len(titles) + 0.2 * k, line, size=BODY, color=SOFT, va="top")
        for k, line in enumerate(reversed(notes)):
            self.put(EDGE, self.height - 0.1 - 0.19 * k, line, color=SOFT, va="bottom")
        for k, row in enumerate(reversed(keys)):
            x, y = EDGE, self.top - head - 0.2 - 0.22 * k
            for name in row:
                self.put(x, y, "┃" if key[name] == LIMIT else "■", size=BODY, color=key[name])
                self.put(x + 0.18, y, name)
                x += 0.4 + width(name)

    def put(self, x: float, y: float, text: str, size=SMALL, va="center", **how):
        return self.fig.text(x / WIDTH, 1 - y / self.height, text, fontsize=size, va=va, **how)

    def names(self, texts: Sequence[str], ys: Sequence[float], right: float, **how):
        """Texts that end at `right`, at heights below the top of the plot."""
        for text, y in zip(texts, ys, strict=True):
            self.put(right, self.top + y, text, size=BODY, ha="right", **how)

    def axes(self, left: float, right: float, rows: float | None = None):
        """Axes of the plot between two places; with `rows` its y runs from 0 to this downwards, and has no ticks."""
        size = ((right - left) / WIDTH, (self.bottom - self.top) / self.height)
        ax = self.fig.add_axes((left / WIDTH, 1 - self.bottom / self.height, *size))
        if rows is not None:
            ax.set_ylim(rows, 0)
            ax.yaxis.set_major_locator(NullLocator())
        return ax

    def place(self, ax, x: float, y: float) -> tuple[float, float]:
        """Where a point of the axes lies on the canvas."""
        right, up = ax.transData.transform((x, y)) / DPI
        return right, self.height - up

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str):
        across, down = [x / WIDTH for x in xs], [1 - y / self.height for y in ys]
        self.fig.add_artist(Line2D(across, down, color=colour, linewidth=0.8))

    def picture(self, rows: Sequence[str]) -> Picture:
        """The finished figure; `rows` are what a screen reader hears after title and sentence."""
        heard = "; ".join(row.strip(" :,") for row in rows)
        stop = "" if self.title.endswith("?") else "."
        alt = f"{self.title}{stop} {self.sentence} {heard}."
        finished.append(self.fig)
        return Picture(_png(self.fig), alt, round(WIDTH * DPI), self.title)


def _balanced(sentence: str, room: float) -> list[str]:
    """The sentence in as few lines as it needs, all of about one length."""
    lines = wrapped(sentence, room, BODY)
    for narrower in np.arange(room, 0.7 * room, -0.15):
        tried = wrapped(sentence, narrower, BODY)
        if len(tried) == len(lines):
            lines = tried
    return lines


def _key_rows(key: Mapping[str, str], room: float) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    for name in key:
        if sum(width(n) + 0.4 for n in [*rows[-1], name]) > room + 0.2:
            rows.append([])
        rows[-1].append(name)
    return rows


def _png(fig: Figure) -> bytes:
    """The same bytes for the same content. A palette of 128 colours makes them a third."""
    raw = io.BytesIO()
    fig.savefig(raw, format="raw", dpi=SHARP * DPI)
    across = round(WIDTH * DPI * SHARP)
    size = across, len(raw.getvalue()) // (4 * across)
    return _compressed(Image.frombytes("RGBA", size, raw.getvalue()).convert("RGB"))


def _compressed(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image = image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.putpalette([255 if part > 251 else part for part in image.getpalette()])  # white, not nearly white
    image.save(file, "PNG", compress_level=4)
    return file.getvalue()


def below_one_another(pictures: Sequence[Picture], text: str) -> Picture:
    """Finished figures as one; `text` is what a test compares."""
    images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in pictures]
    whole = Image.new("RGB", (images[0].width, sum(image.height for image in images)), "white")
    for k, image in enumerate(images):
        whole.paste(image, (0, sum(above.height for above in images[:k])))
    return Picture(_compressed(whole), " ".join(picture.alt for picture in pictures), pictures[0].width, text)


# -- scales and texts


def plain(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:g}"


def ticks(low: float, high: float, log: bool, room: float = 0, text: Callable[[float], str] = plain) -> list[float]:
    """Round values for an axis: 1, 2, 5 over up to two decades, powers of ten or of a thousand over more.

    room: the length in inches of a horizontal axis, whose labels must not meet; those without room are left out.
    """
    if log:
        steps = (1, 2, 5) if high / low < 150 else (1,)
        every = 3 if high / low > 1e8 else 1
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        candidates = [m * 10.0**k for k in powers if k % every == 0 for m in steps]
    else:
        candidates = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    kept, reached = [], -math.inf
    for x in candidates:
        if not low * (1 - 1e-9) <= x <= high * (1 + 1e-9):
            continue
        if not room:
            kept.append(x)
            continue
        share = math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)
        middle, half = room * share, width(text(x)) / 2
        if middle - half > reached and middle + half <= room + 0.12:
            kept.append(x)
            reached = middle + half + 0.1
    return kept


def fixed(axis, at: Sequence[float], texts: Sequence[str] = ()):
    """Ticks at these places alone, with these labels."""
    axis.set_major_locator(FixedLocator(list(at)))
    axis.set_major_formatter(FixedFormatter(list(texts)))
    axis.set_minor_locator(NullLocator())


def stacked(groups: Sequence[str], pitches: Sequence[float]) -> tuple[list[float], list[tuple[float, str]], float]:
    """Rows below one another: their centres, a heading above the first row of each group, and the height of all."""
    centres, headings, y, before = [], [], 0.0, None
    for group, pitch in zip(groups, pitches, strict=True):
        if group and group != before:
            y += 0.1 if centres else 0.0
            headings.append((y + 0.13, group))
            y += 0.28
        before = group
        centres.append(y + pitch / 2)
        y += pitch
    return centres, headings, y


def times(x: float) -> str:
    """A factor as "0.47×", "1.02×", "7.6×", "30×", "1,160×"; "1×" is the baseline itself."""
    if x == 1:
        return "1×"
    if x >= 19.5:
        return f"{plain(float(f'{x:.3g}')) if x >= 100 else f'{x:.0f}'}×"
    return f"{x:.2f}×" if x < 1.1 else f"{x:.1f}×"


def weight(text: str) -> str:
    """Factors are bold, the baseline's own is not."""
    return "bold" if text.endswith("×") and text != "1×" else "normal"


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it, about."""
    return float(np.dot((0.2126, 0.7152, 0.0722), np.power(to_rgb(colour), 2.2)))


def upon(colour: str) -> str:
    """The colour of a text on this one."""
    return INK if _luminance(colour) > 0.21 else "white"


def inked(colour: str) -> str:
    """The colour of a text on white that means this one, dark enough for a contrast of 4.5."""
    darker = np.array(to_rgb(colour)) * min(1, 0.18 / max(_luminance(colour), 1e-9)) ** (1 / 2.2)
    return SOFT if colour == OTHER else to_hex(darker)


def collisions(fig: Figure) -> list[str]:
    """What is wrong with the texts of a figure: too small, outside of it, or upon one another."""
    fig.draw_without_rendering()
    off = {id(t) for ax in fig.axes if not ax.axison for axis in (ax.xaxis, ax.yaxis) for t in axis.findobj(Text)}
    texts = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible() and id(t) not in off]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    right, top = fig.bbox.x1 - 2, fig.bbox.y1
    wrong = [f"too small: {t.get_text()!r}" for t in texts if t.get_fontsize() < SMALL]
    wrong += [f"outside: {s!r}" for s, b in boxes if b.x0 < 2 or b.y0 < 2 or b.x1 > right or b.y1 > top]
    for k, (first, a) in enumerate(boxes):
        for second, b in boxes[k + 1 :]:
            if min(a.x1, b.x1) + 3 > max(a.x0, b.x0) and min(a.y1, b.y1) > max(a.y0, b.y0) + 2:
                wrong.append(f"upon each other: {first!r}, {second!r}")
    return wrong
