"""The rules between rooms, and what an import may cost."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache

import pytest

from perflab import paths

FLOORS = [
    *("bench", "show", "learn", "start", "loading", "launch", "roofline", "trace"),
    *("memory", "parallel", "doctor", "triage", "case", "course"),
]
PACKAGE = paths.COURSE / "perflab"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {path: ("perflab", *path.relative_to(PACKAGE).with_suffix("").parts) for path in SOURCES}
NAMES = {".".join(parts).removesuffix(".__init__"): path for path, parts in MODULES.items()}


def _room(path):
    return MODULES[path][1] if len(MODULES[path]) > 2 else ""


@cache
def _imports(path):
    """The modules of this package that a module imports, those inside functions too."""
    found = set()
    tree = ast.parse(path.read_text())
    for block in [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]:
        tree.body.remove(block)  # for editors alone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in NAMES}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(MODULES[path][: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                full = f"{module}.{alias.name}"
                found |= {full if full in NAMES else module} & set(NAMES)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    if room := _room(path):
        assert room in FLOORS
        above = [name for name in _imports(path) if FLOORS.index(room) < _floor(name)]
        assert not above, f"{room} imports {', '.join(above)}"


def _floor(name):
    """The floor of a module's room; errors and paths are the ground, the other top-level modules stand above all."""
    room = _room(NAMES[name])
    return FLOORS.index(room) if room else -1 if name in ("perflab", "perflab.errors", "perflab.paths") else len(FLOORS)


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions count, too. `__init__` is left out: it is imported with each of its modules."""
    graph = {name: {n for n in _imports(path) if not _is_folder(n)} for name, path in NAMES.items()}
    reached = {name: set(direct) for name, direct in graph.items()}
    changed = True
    while changed:
        changed = False
        for name, direct in reached.items():
            further = direct.union(*(reached[other] for other in direct))
            changed |= further != direct
            reached[name] = further
    assert [name for name, seen in reached.items() if name in seen and not _is_folder(name)] == []


def _is_folder(name):
    return NAMES[name].name == "__init__.py"


def test_no_two_classes_share_a_name():
    classes = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


# Lines. A ceiling comes down with the room below it, and never goes up.
CEILINGS = {"bench": 2840, "show": 1310, "learn": 700, "start": 1200, "loading": 4700, "launch": 1860}
CEILINGS |= {"roofline": 1540, "trace": 1640, "course": 740}
GUARDS_CEILING, CHAPTER_CEILING, PACKAGE_CEILING = 2560, 1100, 16_900


def test_no_room_outgrows_its_ceiling():
    lines = Counter()
    for path in SOURCES:
        lines[_room(path)] += len(path.read_text().splitlines())
    guards = sum(len(p.read_text().splitlines()) for p in (PACKAGE / "loading/guards").rglob("*.py"))
    assert guards <= GUARDS_CEILING and lines["loading"] - guards <= CEILINGS["loading"] - GUARDS_CEILING
    assert {room: n for room, n in lines.items() if n > CEILINGS.get(room, CHAPTER_CEILING)} == {}
    assert lines.total() <= PACKAGE_CEILING


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_opens_by_saying_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.timed
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
            assert path.name == "process.py"
