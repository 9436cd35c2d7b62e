"""Tables, and the one form in which a tool answers: stable text, html, rows and alarms. Draws no figure."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong: what in a sentence, the figures by which it was seen, the remedy in a sentence.

    `about` names the check that found it, where a tool has several.
    """

    what: str
    seen: str
    way_out: str
    about: str = ""

    def __str__(self):
        return ": ".join(filter(None, [self.about, f"{self.what} {self.way_out}".strip()]))


class Answer:
    """What a tool returns. Subclasses give `__repr__` (the same text on every machine), `rows` and `html`.

    `rows()` is a list of dicts, one a row of its table; `alarms` what is wrong, empty where nothing is.
    """

    alarms: Sequence[Alarm] = ()

    def rows(self) -> list[dict]:
        """The figures of this answer as plain data."""
        return []

    def html(self) -> str:
        """The answer as a notebook shows it."""
        return paragraph(str(self)) + table(self.rows())

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": repr(self), "text/html": self.html()}


@dataclass(frozen=True)
class InsteadOfFigure(Answer):
    """A sentence where a figure would stand; `name` is its stable text."""

    name: str
    sentence: str

    def __repr__(self):
        return self.name

    def __str__(self):
        return self.sentence


class Html(str):
    """Text that is html already; every other cell of a table is escaped."""


def table(
    rows: Iterable[Mapping[str, object]],
    notes: Sequence[str] = (),
    colours: Mapping[int, str] | None = None,
) -> str:
    """Rows as an html table: the keys of all rows are its head, in the order in which they first appear.

    notes: lines of small print below. colours: number of a row -> its colour.
    """
    rows, colours = list(rows), colours or {}
    head = list(dict.fromkeys(key for row in rows for key in row))
    parts = ["<table><thead><tr>", *(f"<th>{cell(key)}</th>" for key in head), "</tr></thead><tbody>"]
    for number, row in enumerate(rows):
        colour = f' style="color:{colours[number]}"' if number in colours else ""
        parts += [f"<tr{colour}>", *(f"<td>{cell(row.get(key, ''))}</td>" for key in head), "</tr>"]
    parts.append("</tbody></table>" if head else "")
    return "".join(parts if head else []) + "".join(f"<p><small>{cell(note)}</small></p>" for note in notes)


def paragraph(text: str, colour: str = "") -> str:
    """Text as an html paragraph, a line of text a line."""
    style = f' style="color:{colour}"' if colour else ""
    return f"<p{style}>{'<br>'.join(html.escape(line) for line in text.splitlines())}</p>"


def cell(content: object) -> str:
    """The content of one cell: escaped unless it is Html, long names may break after an underscore."""
    return content if isinstance(content, Html) else html.escape(str(content)).replace("_", "_<wbr>")
