"""A sentence that carries measured numbers, written by a cell from its Result."""

import html
import re

# A number with its unit, or one that stands alone; not the digits inside a name such as C1-1 or 1080p.
_FIGURE = re.compile(
    r"(?<![\w.-])-?\d[\d,.]*(?:\s?(?:ns|us|ms|s|%|images/s|[KMGT]?i?B(?:/s)?|[MGT]?FLOP(?:/s)?)(?!\w)|(?![\w-]))"
)
_NO_INTERVAL = re.compile(r"no interval from \d+ rounds?")  # of Estimate.limits: how many rounds fitted is measured


def say(sentence: str):
    """Show `sentence`. Its stable text has every figure replaced, so that a test compares the words.

    >>> say("Sixteen workers load 7.6 times as fast as none.")  # doctest: +SKIP
    Sixteen workers load # times as fast as none.
    """
    from IPython.display import display

    plain = _FIGURE.sub("#", _NO_INTERVAL.sub("# to #", sentence))
    display({"text/plain": plain, "text/html": f"<p>{html.escape(sentence)}</p>"}, raw=True)
