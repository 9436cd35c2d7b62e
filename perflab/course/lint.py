"""What a committed notebook must keep to. It reads files only; nothing is run here."""

import ast
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from perflab.bench import record
from perflab.bench.result import Result
from perflab.errors import PerflabError, first_line
from perflab.start.board import Board
from perflab.start.split import Split

from .form import WIDGET_VIEW, as_text, normalise, notebook_files, read
from .kernel import cell_name

TAGS = {"nbval-ignore-output", "raises-exception", "exercise", "solution", "hide-input"}
MAX_BYTES = 1_500_000
MAX_LINES = 20
MAX_MEDIAN_LINES = 6
DEFINITION = "<!-- definition -->"

UNSTABLE = {
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}"),
    "a path of the kernel": re.compile(r"ipykernel_\d+"),
    "a path of a home folder": re.compile(r"(?<![\w.])/(?:home|root|Users)/"),
    "a path of a temporary folder": re.compile(r"(?<![\w.])/(?:tmp|var/tmp|var/folders)/"),
}
BARE_IMAGE = re.compile(r"<img(?![^>]*\balt=(?:\"[^\"]+\"|'[^']+'))[^>]*>")

_GAP = r"(?:[\s\u00a0\u202f~-]|\\[,;: ]|&nbsp;|&thinsp;)"
_SCALED = r"[kKMGTP]i?(?:B|bit|FLOPS?|FLOPs|Hz)"
_THING = r"(?:img|image|sample|token|step|batch|batche|record|file|it|op|kernel|request)s?"
_UNIT = rf"(?:ns|us|µs|μs|ms|min|(?:{_SCALED}|B|FLOPs?|{_THING})/s|{_SCALED}|FLOPS|bytes?|W|°C|\\?%)"
_SECONDS = rf"(?:{_GAP}+s|{_GAP}*(?:sec|seconds?))"  # "1990s" is no measurement, "5s" is caught below
MEASURED = re.compile(rf"(?<![\w.])(?:\d[\d.,']*(?:{_GAP}*{_UNIT}|{_SECONDS})|\d{{1,3}}(?:\.\d+)?s)(?![\w/])")


def check(names: str | Path | Iterable[str | Path] = ()) -> list[str]:
    """One sentence for every fault found in the named notebooks (all without names); empty is good."""
    return [f"{path.stem}: {fault}" for path in notebook_files(names) for fault in faults(path)]


def faults(path: Path) -> Iterator[str]:
    """The faults of one notebook's file."""
    nb = read(path)
    raw = path.read_text("utf-8")
    if raw != as_text(normalise(nb)):
        yield "not in normal form; run `make notebooks`, or `git checkout notebooks` if you only ran it in JupyterLab"
    if "widgets" in nb.metadata:
        yield "holds widget state; GitHub shows such a notebook as invalid"
    if len(raw.encode()) > MAX_BYTES:
        yield f"{len(raw.encode()) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.1f} MB"
    try:
        nbformat.validate(normalise(nb))
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error.message}"
        return
    yield from _execution(nb)
    for index, cell in enumerate(nb.cells):
        found = _code(cell) if cell.cell_type == "code" else _prose(cell)
        yield from (f"{cell_name(nb, index)}: {fault}" for fault in found)


def _execution(nb: NotebookNode) -> Iterator[str]:
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "code cells not executed 1 to n in order, and what was not executed is not compared"
    lines = [_lines(cell) for cell in code]
    middle = statistics.median(lines) if lines else 0
    if middle > MAX_MEDIAN_LINES:
        yield f"code cells have {middle:g} lines in the median, more than {MAX_MEDIAN_LINES}"


def _lines(cell: NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def _code(cell: NotebookNode) -> Iterator[str]:
    tags = set(cell.metadata.get("tags", []))
    yield from _unknown_tags(tags)
    if _lines(cell) > MAX_LINES:
        yield f"{_lines(cell)} lines of code, more than {MAX_LINES}"
    error = next((output for output in cell.outputs if output.output_type == "error"), None)
    if error and "raises-exception" not in tags:
        yield f"error output without the tag raises-exception: {error.ename}: {error.evalue}"
    if "raises-exception" in tags and not error:
        yield "tagged raises-exception, and raised nothing"
    for output in cell.outputs:
        yield from _output(output)


def _unknown_tags(tags: set[str]) -> Iterator[str]:
    if unknown := sorted(tags - TAGS):
        yield f"unknown tag {', '.join(unknown)}; allowed are {', '.join(sorted(TAGS))}"


def _output(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "stream" and output.name == "stderr":
        yield f"output on stderr: {output.text.strip()[:80]!r}"
    text = _readable(output)
    for what, pattern in UNSTABLE.items():
        if found := pattern.search(text):
            yield f"{what} in the output: {found.group()!r}"
    data = output.get("data", {})
    if set(data) == {WIDGET_VIEW}:
        yield "a widget without a picture or a text beside it, which shows nothing in a file"
    if any(mime.startswith("image/") for mime in data):
        said = data.get("text/plain", "").strip()
        if not said or re.fullmatch(r"<.*>", said, re.DOTALL):
            yield f"a picture without alternative text (its text/plain is {said!r})"
    if BARE_IMAGE.search(data.get("text/html", "")):
        yield "a picture in HTML without alternative text"


def _readable(output: NotebookNode) -> str:
    parts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
    data = output.get("data", {})
    parts += [str(value) for mime, value in data.items() if mime == "image/svg+xml" or "image/" not in mime]
    return "\n".join(parts)


def _prose(cell: NotebookNode) -> Iterator[str]:
    yield from _unknown_tags(set(cell.metadata.get("tags", [])))
    # Neither a link's target nor an attribute is prose.
    text = re.sub(r"\]\([^)]*\)|</?[a-zA-Z][^>]*>", " ", cell.source)
    tied = cell.metadata.get("figures", {})
    if not cell.source.rstrip().endswith(DEFINITION):
        for found in MEASURED.finditer(text):
            if not any(found.group().strip() in figure for figure in tied):
                yield (
                    f"prose types a number with a unit, {found.group().strip()!r}; let a code cell say it, tie it to "
                    f"the record in the cell's metadata, or end the cell with {DEFINITION}"
                )
    yield from _untrue(cell.source, tied)
    if re.search(r"!\[\s*\]\(", cell.source) or BARE_IMAGE.search(cell.source):
        yield "a picture without alternative text"


# -- figures of prose, tied to the record

UNITS = {"%": 100.0, "ms": 1e3, "us": 1e6, "GB/s": 1e-9, "TB/s": 1e-12, "TFLOP/s": 1e-12, "MiB": 2.0**-20}
PLAIN = (ast.Expression, ast.Call, ast.Attribute, ast.Subscript, ast.Name, ast.Constant, ast.keyword, ast.BinOp)


def _untrue(text: str, tied: dict[str, str]) -> Iterator[str]:
    """What the record does not say: `tied` maps a figure of the text ("61 %") to an expression over the record.

    Expressions know result(study), split(study) and board(chapter) of the first recorded machine.
    """
    for figure, expression in tied.items():
        if figure not in text:
            yield f"the figure {figure!r} is tied to the record, but does not stand in the text"
            continue
        number = re.search(r"-?\d[\d,]*\.?\d*", figure)
        digits = number.group().replace(",", "")
        last_place = 10.0 ** -len(digits.partition(".")[2])
        try:
            recorded = _looked_up(expression)
        except Exception as error:
            yield f"the figure {figure!r} cannot be looked up: {first_line(error)}"
            continue
        unit = figure[number.end() :].strip().split(" ")[0]
        value = getattr(recorded, "mid", recorded) * UNITS.get(unit, 1.0)
        if not abs(value - float(digits)) <= 0.501 * last_place:
            yield f"the figure {figure!r} is {value:.4g} in the record: mend the sentence"


def _looked_up(expression: str):
    """The value of an expression that only calls, and computes; a notebook that somebody sent runs nothing else."""
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, (*PLAIN, ast.Load, ast.operator)) or getattr(node, "attr", "").startswith("_"):
            raise PerflabError(f"{expression!r} is more than a look-up")
    known = {"result": _recorded, "split": _split, "board": _board, "__builtins__": {}}
    return eval(compile(tree, "figure", "eval"), known)


def _recorded(study: str, version: int = 1, **fixed) -> Result:
    (machine, *_) = record.machines()
    result = record.recorded(machine, study, version, fixed)
    if result is None:
        raise PerflabError(f"{study} is not recorded on {machine}")
    return result


def _split(study: str) -> Split:
    return Split(_recorded(study))


def _board(chapter: str) -> Board:
    return Board(_recorded(f"{chapter}.board"))
