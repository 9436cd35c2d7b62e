"""A sentence that carries measured numbers, written by a cell from its Result."""

import html
import re
from collections.abc import Callable

from perflab.bench import machine, record
from perflab.bench.result import Result

# A number with its unit, or one that stands alone; not the digits inside a name such as C1-1 or 1080p.
_FIGURE = re.compile(
    r"(?<![\w.-])-?\d[\d,.]*(?:\s?(?:ns|us|ms|s|%|images/s|[KMGT]?i?B(?:/s)?|[MGT]?FLOP(?:/s)?)(?!\w)|(?![\w-]))"
)
_NO_INTERVAL = re.compile(r"no interval from \d+ rounds?")  # of Estimate.limits: how many rounds fitted is measured


def say(sentence: str, *figures: Callable[[Result], object], of: Result | None = None):
    """Show `sentence`. Its stable text has every figure replaced, so that a test compares the words.

    figures: functions of a Result that fill the places {} of the sentence; it is then said of `of`, and once more
    of each recorded machine that knows the same study. An Estimate brings its interval.

    >>> say("Sixteen workers load 7.6 times as fast as none.")  # doctest: +SKIP
    Sixteen workers load # times as fast as none.
    >>> say("Sixteen workers load {} times as fast.", lambda r: r.ratio(0, 16), of=sweep)  # doctest: +SKIP
    Sixteen workers load # times as fast.
    """
    from IPython.display import display

    if of is None:
        plain, lines = _FIGURE.sub("#", _NO_INTERVAL.sub("# to #", sentence)), [sentence]
    else:
        plain = re.sub(r"\{[^}]*\}", "#", sentence)
        lines = [_of_machine(result, sentence.format(*(f(result) for f in figures))) for result in _known(of)]
    shown = "<br>".join(html.escape(line) for line in lines)
    display({"text/plain": plain, "text/html": f"<p>{shown}</p>"}, raw=True)


def _known(result: Result) -> list[Result]:
    """This result if it was measured, and those of recorded machines."""
    beside = record.beside(result) if result.source == "here" else []
    return [one for one in (result, *beside) if one.measured]


def _of_machine(result: Result, sentence: str) -> str:
    where = "This machine" if result.source == "here" else machine.processor(result.machine)
    return f"{where}: {sentence}"
