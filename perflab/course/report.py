"""Runs the course on this machine and writes report/, which opens in a browser without a network."""

import html
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from perflab import paths
from perflab.errors import PerflabError
from perflab.learn.claims import card

from .form import as_text, normalise, notebook_files, read, write
from .kernel import run

LIVE = {"PERFLAB_MACHINE": None, "PERFLAB_RECORD": None, "PERFLAB_PROGRESS": "off"}

# nbconvert's page without what it would load from the network (require.js, MathJax, Mermaid, widgets),
# and with the text of a figure as its alternative text.
PAGE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block data_png %}{{ super() | replace('<img ', '<img alt="'
    ~ output.data.get('text/plain', 'figure') | escape_html ~ '" ') }}{% endblock %}
"""

INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>perflab: the course on this machine</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 56em; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .3em .9em .3em 0; text-align: left; vertical-align: top; }}
td.n {{ text-align: right; }} .failed {{ color: #b00020; }}
</style></head><body>
<h1>The course on this machine</h1>
<p>{summary}</p>
<table><thead><tr><th>notebook</th><th>state</th><th>seconds</th></tr></thead>
<tbody>
{rows}
</tbody></table>
{card}
</body></html>
"""


@dataclass(frozen=True)
class RunOutcome:
    """How one notebook fared; `reason` is empty where it ran to its end."""

    stem: str
    seconds: float
    reason: str = ""


def course(names: str | Path | Iterable[str | Path] = (), into: Path | None = None) -> list[RunOutcome]:
    """Run the named notebooks (all without names) live, with the learner's own logbook, into `report/`.

    The notebooks of the course stay as they are. One that fails is listed with its reason, shown
    up to the failing cell, and the run goes on.
    """
    into = into or paths.COURSE / "report"
    outcomes = []
    for path in notebook_files(names):
        print(f"{path.stem:24} ", end="", flush=True)
        outcome = _run_one(path, into)
        outcomes.append(outcome)
        write(into / "index.html", _index(outcomes))
        print(f"{'FAILED' if outcome.reason else 'ran':8} {outcome.seconds:6.1f} s")
        if outcome.reason:
            print(f"  {outcome.reason}")
    return outcomes


def page(nb: NotebookNode, name: str, folder: Path) -> str:
    """The notebook as one HTML page; pictures of `folder` that its text shows are put into the page."""
    try:
        loader = DictLoader({"page.html.j2": PAGE})
        exporter = HTMLExporter(extra_loaders=[loader], template_file="page.html.j2", embed_images=True)
    except ValueError:  # packages put in by hand may lack nbconvert's share/ folder
        raise PerflabError("the pages cannot be made: nbconvert's templates are missing; reinstall it.") from None
    body, _ = exporter.from_notebook_node(nb, resources={"metadata": {"name": name, "path": str(folder)}})
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', body)


def _run_one(path: Path, into: Path) -> RunOutcome:
    start, reason = time.perf_counter(), ""
    try:
        nb = read(path)
        for cell in nb.cells:  # nothing of another machine may stand behind a cell that fails here
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        try:
            run(nb, path, LIVE)
        finally:
            write(into / path.name, as_text(normalise(nb)))
            write(into / f"{path.stem}.html", page(normalise(nb), path.stem, path.parent))
    except PerflabError as error:
        reason = str(error)
    return RunOutcome(path.stem, time.perf_counter() - start, reason)


def _index(outcomes: list[RunOutcome]) -> str:
    failed = sum(bool(outcome.reason) for outcome in outcomes)
    return INDEX.format(
        summary=f"{len(outcomes) - failed} of {len(outcomes)} notebooks ran to their end.",
        rows="\n".join(_row(outcome) for outcome in outcomes),
        card=_card(),
    )


def _row(outcome: RunOutcome) -> str:
    state = f'<span class="failed">failed: {html.escape(outcome.reason)}</span>' if outcome.reason else "ran"
    link = f'<a href="{outcome.stem}.html">{outcome.stem}</a>'
    return f'<tr><td>{link}</td><td>{state}</td><td class="n">{outcome.seconds:.1f}</td></tr>'


def _card() -> str:
    try:
        shown = card().html()
    except PerflabError as error:  # a logbook that cannot be read is no reason to lose the report
        shown = f"<p>{html.escape(str(error))}</p>"
    return f"<h2>Verdicts</h2>\n{shown}"
