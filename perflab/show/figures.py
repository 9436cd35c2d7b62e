"""A Result as a table, a figure and a line of provenance, with recorded machines beside it."""

from collections.abc import Sequence

from perflab.bench import record
from perflab.bench.result import Result

from . import style
from .results import drawn
from .table import Html, cell
from .table import table as html_table


def display_table(result: Result):
    """Show the table of a Result alone, where a figure would say nothing more."""
    from IPython.display import display

    display({"text/plain": repr(result), "text/html": table(result, record.beside(result))}, raw=True)


def display_result(result: Result):
    """Show a Result in a notebook: its table, then its figure."""
    from IPython.display import display

    display_table(result)
    if (figure := drawn(result)) is not None:
        display(figure)


def table(result: Result, beside: Sequence[Result] = ()) -> str:
    """The summary as HTML: this result's rows, then in grey those of recorded machines, then provenance."""
    nothing_here = all(v in result.reasons for v in result.values)
    rows = [] if nothing_here and beside else result.summary()
    colours = {}
    for recorded in beside:
        for row in recorded.summary():
            name = f"{cell(row[result.variable])} <i>({cell(recorded.source)})</i>"
            colours[len(rows)] = style.RECORDED
            rows.append(row | {result.variable: Html(name)})
    small = (f'<p style="color:{style.RECORDED}"><small>{cell(r.provenance)}</small></p>' for r in beside)
    return html_table(rows, [result.provenance], colours) + "".join(small)
