"""What the environment says about how to measure. Reads variables only."""

import os

from perflab.errors import PerflabError

BUDGETS = ("quick", "full")


def budget() -> str:
    """ "quick" or "full", from $PERFLAB_BUDGET. Raises PerflabError for anything else.

    >>> budget()
    'quick'
    """
    name = os.environ.get("PERFLAB_BUDGET") or "quick"
    if name not in BUDGETS:
        raise PerflabError(f"PERFLAB_BUDGET={name} is unknown: use one of {', '.join(BUDGETS)}.")
    return name
