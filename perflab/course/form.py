"""Which notebooks the course has, and the one form in which a notebook is kept. Nothing is run here.

The form holds what a reader sees and what a test compares, and nothing that differs from run to
run: a second run of the same notebook gives the same bytes.
"""

import copy
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from perflab import paths
from perflab.bench.files import put
from perflab.errors import PerflabError

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
IMAGE_METADATA = ("width", "height", "alt")


def notebook_files(names: str | Path | Iterable[str | Path] = ()) -> list[Path]:
    """The notebooks with these names, in the order given; all of them, in the order of the course, without.

    A name is a number ("00"), a stem ("00_start_here"), or the path of any notebook. An unknown
    name raises PerflabError.
    """
    known = sorted(paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    if isinstance(names, str | Path):
        names = [names]
    return [_one(name, known) for name in names] or known


def _one(name: str | Path, known: list[Path]) -> Path:
    for path in known:
        if str(name) in (path.stem[:2], path.stem, path.name):
            return path
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    there = ", ".join(path.stem for path in known) or "none yet"
    raise PerflabError(f"there is no notebook {str(name)!r}; those of the course are: {there}.")


def read(path: Path) -> NotebookNode:
    """The notebook as it stands in the file, no id or field added; PerflabError if it is none."""
    try:
        nb = nbformat.v4.reads(path.read_text("utf-8"))
        if nb.nbformat != 4:
            raise ValueError(f"its format is {nb.nbformat}, not 4")
    except OSError as error:
        raise PerflabError(f"{path.name} cannot be read: {error.strerror}.") from error
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise PerflabError(
            f"{path} is not a notebook ({error}); take the file back from git, or download it again."
        ) from error
    return nb


def normalise(nb: NotebookNode) -> NotebookNode:
    """A copy of the notebook in the normal form; the normal form of a normal form is itself."""
    nb = copy.deepcopy(nb)
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    _give_ids(nb.cells)
    for cell in nb.cells:
        tags = sorted(set(cell.metadata.get("tags", [])))
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = _outputs(cell.outputs)
    return nb


def as_text(nb: NotebookNode) -> str:
    """The text of the notebook's file: keys sorted, lines of sources and outputs one by one."""
    return nbformat.v4.writes(nb) + "\n"


def write(path: Path, text: str) -> bool:
    """Put text into the file, whole or not at all; False where it stood there already."""
    if path.is_file() and path.read_text("utf-8") == text:
        return False
    try:
        put(path, text.encode())
    except OSError as error:
        raise PerflabError(f"{path} cannot be written: {error.strerror}; free the place and go on.") from error
    return True


def _give_ids(cells: list[NotebookNode]) -> None:
    """A cell keeps its id; one that has none, or another cell's, gets the first free number."""
    taken: set[str] = set()
    without = []
    for cell in cells:
        name = cell.get("id", "")
        if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) and name not in taken:
            taken.add(name)
        else:
            without.append(cell)
    numbers = (f"c{n:02d}" for n in itertools.count())
    free = (name for name in numbers if name not in taken)
    for cell in without:
        cell.id = next(free)


def _outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of one stream joined, metadata of pictures alone, no view of a widget beside a picture."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":  # of a line that was overwritten, what a terminal would show
            output.text = re.sub(r"(?m)^.*\r(?=[^\n])", "", output.text.replace("\r\n", "\n"))
        if "data" in output:
            output.metadata = nbformat.from_dict(
                {
                    mime: {key: value for key, value in fields.items() if key in IMAGE_METADATA}
                    for mime, fields in output.metadata.items()
                    if mime.startswith("image/")
                }
            )
            if len(output.data) > 1:
                output.data.pop(WIDGET_VIEW, None)  # in a file nothing is behind it, and it hides the picture
    return joined
