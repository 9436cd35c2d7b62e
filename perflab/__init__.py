"""perflab: a course on AI systems performance that measures the learner's own machine.

Names are loaded when they are first used, so that `import perflab` costs nothing, touches no GPU and
pulls in neither matplotlib nor pandas nor ipywidgets.
"""

import importlib

_HOME = {
    "vary": "bench.study",
    "observe": "bench.study",
    "budget": "bench.job",
    "samples": "bench.timing",
    "release": "bench.closing",
    "fresh": "bench.elsewhere",
    "split": "triage.split",
    "guards": "loading.guards",
    "advise": "loading.sweep",
    "profiled": "kernels.profile",
    "predict": "learn.predict",
    "calibration": "learn.predict",
    "question": "learn.question",
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
