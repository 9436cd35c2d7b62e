"""What all tests share: which notebooks are meant, and a plain account at the end of what was run."""

import json
import os
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

SLOWEST = 30
CROWDED = 0.1  # of the cores, in other processes: more, and a comparison of times says nothing
LIVE_CEILING_S = 30
PARAMETERS = {"notebook", "one_notebook"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--notebook",
        action="append",
        metavar="NN",
        help="only the tests of this notebook, by number, name or path; may be given more than once",
    )


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" leaves it ignored, children too
    if config.getoption("--notebook"):
        chosen_notebooks(config)  # a wrong name is said once, and not by every test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`notebook` is each notebook of the course; `one_notebook` the first, for what is true of all alike."""
    if not PARAMETERS & set(metafunc.fixturenames):
        return
    chosen = chosen_notebooks(metafunc.config)
    for name in PARAMETERS & set(metafunc.fixturenames):
        some = chosen[:1] if name == "one_notebook" else chosen
        none = [pytest.param(None, marks=pytest.mark.skip("the course has no notebook yet"), id="none")]
        metafunc.parametrize(name, [pytest.param(path, id=path.stem) for path in some] or none)


def chosen_notebooks(config: pytest.Config) -> list[Path]:
    """The notebooks meant by --notebook; all of them without."""
    from perflab.course import notebook_files  # here, as most tests need no Jupyter
    from perflab.errors import PerflabError

    try:
        return notebook_files(config.getoption("--notebook") or ())
    except PerflabError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--notebook"):
        return
    of_a_notebook = [item for item in items if hasattr(item, "callspec") and PARAMETERS & set(item.callspec.params)]
    others = [item for item in items if item not in of_a_notebook]
    config.hook.pytest_deselected(items=others)
    items[:] = of_a_notebook


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A test that compares times cannot tell, and is named as skipped, where others took the cores meanwhile."""
    if item.get_closest_marker("timed") is None:
        return (yield)
    began, others = time.monotonic(), -_cores_s_of_others()
    try:
        return (yield)
    except AssertionError:
        taken = (others + _cores_s_of_others()) / (time.monotonic() - began)
        if taken > CROWDED * psutil.cpu_count():
            pytest.skip(f"CANNOT TELL: a time was off while other processes took {CROWDED:.0%} of the cores or more")
        raise


def _cores_s_of_others() -> float:
    """Seconds of all cores that went to other processes than this one and the children that it has waited for."""
    whole, own = psutil.cpu_times(), os.times()
    return whole.user + whole.system + whole.nice - sum(own[:4])


@pytest.fixture
def note(request: pytest.FixtureRequest):
    """note("...") puts a line into the account at the end of the run, from a worker of xdist, too."""
    return lambda line, kind="note": request.node.user_properties.append((kind, line))


@pytest.fixture(scope="session")
def weekly(request: pytest.FixtureRequest) -> bool:
    """Whether this run leaves nothing out."""
    return "not weekly" not in request.config.getoption("markexpr")


@pytest.fixture
def live_home(request: pytest.FixtureRequest, tmp_path: Path):
    """A learner's folder for a live run; the verdicts that are in it afterwards are counted."""
    home = tmp_path / "home"
    yield home
    for path in home.glob("verdicts/*.json"):
        verdict = json.loads(path.read_text("utf-8"))
        if verdict.get("source", "here") == "here":  # what rests on a recorded machine says nothing about this one
            request.node.user_properties.append(("verdict", verdict["state"]))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    told = defaultdict(list)
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        if getattr(report, "when", "") == "teardown":  # the last report of a test carries all that it told
            for kind, line in report.user_properties:
                told[kind].append(line)
    sections = {
        "not run, and why": list(_skipped(terminalreporter)),
        "slowest": list(_slowest(terminalreporter)),
        "live verdicts": list(_verdicts(Counter(told["verdict"]))),
        f"live, ceiling {LIVE_CEILING_S} s a notebook": sorted(told["live"]),
        "notes": told["note"],
    }
    terminalreporter.section("perflab")
    for title, lines in sections.items():
        if lines:
            terminalreporter.write_line(f"{title}:")
        for line in lines:
            terminalreporter.write_line(f"  {line}")


def _skipped(reporter):
    reasons = Counter()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    yield from (f"{count} x {reason}" for reason, count in reasons.most_common())
    if deselected := len(reporter.stats.get("deselected", [])):
        yield f"{deselected} x deselected on the command line"


def _slowest(reporter):
    seconds = defaultdict(float)
    for reports in reporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "when"):
                seconds[report.nodeid] += report.duration
    slow = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    yield from (f"{duration:7.2f} s  {nodeid}" for nodeid, duration in slow if duration >= 0.1)


def _verdicts(states: Counter):
    if total := sum(states.values()):
        unsure = states["CANNOT TELL"]
        yield f"{unsure} of {total} say CANNOT TELL ({100 * unsure / total:.0f} %)"
