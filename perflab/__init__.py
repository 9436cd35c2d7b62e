"""perflab: a course on AI systems performance that measures the learner's own machine.

Names are loaded when they are first used, so that `import perflab` costs nothing, touches no GPU and
pulls in neither matplotlib nor pandas nor ipywidgets.
"""

import importlib
import sys

_HOME = {
    "vary": "bench.study",
    "observe": "bench.study",
    "budget": "bench.settings",
    "samples": "bench.timing",
    "release": "bench.cleanup",
    "fresh": "bench.process",
    "split": "start.split",
    "guards": "loading.guards",
    "advise": "loading.advise",
    "profiled": "trace.profile",
    "predict": "learn.predict",
    "calibration": "learn.predict",
    "question": "exercises",
    "judge": "learn.claims",
    "card": "learn.claims",
    "say": "learn.say",
    "PerflabError": "errors",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'perflab' has no attribute {name!r}")
    module = importlib.import_module(f"perflab.{_HOME[name]}")
    return getattr(module, name)


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
