"""The rules between rooms, and what an import may cost."""

import ast
import subprocess
import sys

import pytest

from perflab import places

FLOORS = ["bench", "show", "loading", "kernels", "memory", "parallel", "doctor", "triage", "learn"]
LAZY_EXCEPTION = {("bench", "show")}  # a Result draws itself
SOURCES = sorted((places.COURSE / "perflab").rglob("*.py"))


def _room(path):
    parts = path.relative_to(places.COURSE / "perflab").parts
    return parts[0] if len(parts) > 1 else ""


def _imports(path):
    """(room, is it inside a function) of every import of this package."""
    tree = ast.parse(path.read_text())
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{a.name}" if module == "perflab" else module for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "perflab" and len(parts) > 1 and parts[1] in FLOORS:
                yield parts[1], id(node) in inner


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(places.COURSE)))
def test_a_room_imports_only_rooms_below_it(path):
    room = _room(path)
    if room not in FLOORS:
        return
    for other, inside in _imports(path):
        below = FLOORS.index(other) <= FLOORS.index(room)
        assert below or (inside and (room, other) in LAZY_EXCEPTION), f"{room} imports {other}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(places.COURSE)))
def test_a_file_fits_the_head(path):
    assert len(path.read_text().splitlines()) <= 330
    assert ast.get_docstring(ast.parse(path.read_text())), "a module opens by saying what it is for"


@pytest.mark.parametrize("module", ["perflab", "perflab.bench.study", "perflab.loading.images"])
def test_an_import_pulls_in_nothing_that_draws_and_touches_no_gpu(module):
    probe = (
        f"import sys, time, torch\nbegan = time.perf_counter()\nimport {module}\n"
        "print(time.perf_counter() - began)\n"
        "print([m for m in ('matplotlib', 'pandas', 'ipywidgets', 'IPython') if m in sys.modules])\n"
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    seconds, drawn, touched = done.stdout.splitlines()
    assert drawn == "[]" and touched == "False" and done.stderr == ""
    if module == "perflab":
        assert float(seconds) < 0.5  # 0.1 s on a quiet machine


def test_every_public_name_is_there():
    import perflab

    assert all(getattr(perflab, name) is not None for name in perflab.__all__)


def test_no_unpickling_of_files():
    """cloudpickle reads what our own parent process sent; nothing else reads a pickle."""
    for path in SOURCES:
        text = path.read_text()
        assert "torch.load" not in text and "pickle.load(" not in text, path
        if "pickle.loads" in text:
            assert path.name == "elsewhere.py"
