"""The one error that this package raises on purpose, and how any error is told in one line."""


class PerflabError(Exception):
    """What went wrong and how to go on, in one sentence that a learner can act on.

    A notebook shows the sentence alone: the stack of this package helps nobody mend a
    wrong folder or a misspelt study.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"perflab: {self}"]


def first_line(error: BaseException) -> str:
    """An error as one line for a table or a sentence: its type and the first line of what it says.

    Of an error that a DataLoader worker passed on, the worker's own words; of a PerflabError its sentence.

    >>> first_line(ValueError("the shapes differ\\nsee above"))
    'ValueError: the shapes differ'
    """
    lines = str(error).strip().splitlines()
    if lines and isinstance(error, PerflabError):
        return lines[0][:300]
    if lines and lines[0].startswith("Caught ") and "worker" in lines[0]:
        return f"{lines[-1][:200]} (in a DataLoader worker)"
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__
