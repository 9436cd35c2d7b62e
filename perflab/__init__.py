"""perflab: a course on AI systems performance that measures the learner's own machine.

Names are loaded when they are first used, so that `import perflab` costs nothing, touches no GPU and
pulls in neither matplotlib nor pandas nor ipywidgets.
"""

import importlib
import sys
from typing import TYPE_CHECKING

# ruff: noqa: F401 (imported for editors alone)

if TYPE_CHECKING:  # what editors complete; at run time `__getattr__` loads a name when it is first used
    from perflab.bench.cleanup import release
    from perflab.bench.process import fresh
    from perflab.bench.settings import budget
    from perflab.bench.study import observe, vary
    from perflab.bench.timing import samples
    from perflab.errors import PerflabError
    from perflab.exercises import question
    from perflab.launch.compile import compiled
    from perflab.launch.graphs import capture
    from perflab.launch.waits import host_syncs
    from perflab.learn.claims import card, judge
    from perflab.learn.predict import calibration, predict
    from perflab.learn.say import say
    from perflab.loading.advise import advise
    from perflab.loading.errors import explain
    from perflab.loading.guards import guards
    from perflab.memory.peak import peak_step
    from perflab.roofline.precision import audit
    from perflab.roofline.work import counted
    from perflab.start.board import board, scoreboard
    from perflab.start.split import split
    from perflab.trace.profile import profiled
    from perflab.trace.trace import read_trace

_MEASURE = {
    "vary": "bench.study",
    "observe": "bench.study",
    "samples": "bench.timing",
    "fresh": "bench.process",
    "budget": "bench.settings",
    "release": "bench.cleanup",
}
_EXAMINE = {
    "split": "start.split",
    "guards": "loading.guards",
    "advise": "loading.advise",
    "profiled": "trace.profile",
    "read_trace": "trace.trace",
    "host_syncs": "launch.waits",
    "peak_step": "memory.peak",
    "counted": "roofline.work",
    "audit": "roofline.precision",
    "compiled": "launch.compile",
    "capture": "launch.graphs",
    "explain": "loading.errors",
}
_LEARN = {
    "predict": "learn.predict",
    "question": "exercises",
    "judge": "learn.claims",
    "card": "learn.claims",
    "calibration": "learn.predict",
    "say": "learn.say",
    "board": "start.board",
    "scoreboard": "start.board",
}
_HOME = {**_MEASURE, **_EXAMINE, **_LEARN, "PerflabError": "errors"}  # name -> module

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'perflab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"perflab.{_HOME[name]}"), name)


def __dir__():
    return __all__


def _draw_results():
    """In IPython a Result is shown as table and figure, though `bench` knows nothing of `show`."""

    def shown(result):
        from perflab.show.figures import display_result

        display_result(result)

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.display_formatter.ipython_display_formatter.for_type_by_name("perflab.bench.result", "Result", shown)


_draw_results()
