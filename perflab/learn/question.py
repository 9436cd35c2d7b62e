"""Exercises: a question that can be checked, hinted at and solved. It never raises at the learner."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from perflab.bench.estimate import HOLDS, NOT, Estimate
from perflab.show.table import Answer

CORRECT, INCORRECT, NOT_YET, CANNOT = "Correct", "Not right", "Not yet", "CANNOT TELL"


@dataclass(frozen=True)
class Outcome(Answer):
    """What a check says: one of the four words, and a sentence."""

    state: str
    sentence: str = ""

    def __repr__(self):
        return f"{self.state}: {self.sentence}" if self.sentence else f"{self.state}."

    def html(self) -> str:
        colour = {CORRECT: "#00795a", INCORRECT: "#b34700"}.get(self.state, "#5a5a5a")
        return f'<p><b style="color:{colour}">{self.state}</b> {escape(self.sentence)}</p>'


def as_number(answer) -> float:
    """The answer as a number; nan where it is none, such as a text, a list or True."""
    try:
        return math.nan if isinstance(answer, bool | str) else float(answer)
    except (TypeError, ValueError):
        return math.nan


def numeric(
    right: float | Sequence[float],
    praise: str,
    slips: Sequence[tuple[float | Sequence[float], str]],
    otherwise: str,
    *,
    example: str,
    tolerance: float = 0.01,
) -> Callable[[object], Outcome]:
    """The check of an answer that is a number, or a list of as many numbers as `right` has.

    slips: what a known mistake gives, and the sentence that it hears; the first that fits is said. otherwise:
    the sentence for any other number. example: the form of an answer, such as "one number, in GiB".
    tolerance: relative.
    """
    wanted = _numbers(right)

    def check(answer) -> Outcome:
        given = _numbers(answer)
        if len(given) != len(wanted) or any(map(math.isnan, given)):
            return Outcome(INCORRECT, f"the answer is {example}.")
        for numbers, state, sentence in [(right, CORRECT, praise), *((slip, INCORRECT, said) for slip, said in slips)]:
            if np.allclose(given, _numbers(numbers), rtol=tolerance, atol=0):
                return Outcome(state, sentence)
        return Outcome(INCORRECT, otherwise)

    return check


def _numbers(answer) -> list[float]:
    members = answer if isinstance(answer, Iterable) and not isinstance(answer, str | Mapping) else [answer]
    return [as_number(x) for x in members]


def timed(gain: Estimate, times: float, right: str, too_slow: str) -> Outcome:
    """The outcome of an answer that is right and has to be fast: `gain` is how many times as fast it is.

    right, too_slow: sentences; what cannot be told here says so, with the figures.
    """
    state = gain.at_least(times).state
    if state == HOLDS:
        return Outcome(CORRECT, right)
    if state == NOT:
        return Outcome(INCORRECT, too_slow)
    unclear = f"it is right, but the time cannot tell whether it is {times:g} times as fast"
    return Outcome(CANNOT, f"{unclear} ({gain}): check again on a quiet machine.")


def takes(answer, arguments: Sequence[str]) -> Outcome | None:
    """None where `answer` can be called with these arguments, by position; else what to hear."""
    if not callable(answer):
        return Outcome(INCORRECT, f"the answer is a function of {', '.join(arguments) or 'no argument'}.")
    try:
        inspect.signature(answer).bind(*arguments)
    except TypeError:
        return Outcome(INCORRECT, f"your function is called with {', '.join(arguments) or 'no argument'}.")
    except ValueError:  # a built-in function that does not tell its arguments
        return None
    return None


@dataclass(frozen=True)
class Problem:
    """What an author writes: the task, the check of an answer, hints, and a solution as source text."""

    task: str
    check: Callable[[object], Outcome]
    hints: tuple[str, ...]
    solution: str


class Question(Answer):
    """One exercise as a notebook shows it."""

    def __init__(self, id: str, problem: Problem):
        self.id, self.problem, self._hinted = id, problem, 0

    def check(self, answer=...) -> Outcome:
        """Judge an answer. Left at `...` it is "Not yet"; an answer that raises hears what it raised."""
        if answer is ... or answer is None:
            return Outcome(NOT_YET, "put your answer in place of the three dots, and run the cell again.")
        try:
            return self.problem.check(answer)
        except (Exception, SystemExit) as e:
            return Outcome(INCORRECT, f"your answer raised {type(e).__name__}: {e}")

    def hint(self) -> Outcome:
        """The next hint; the last one repeats."""
        n = min(self._hinted, len(self.problem.hints) - 1)
        self._hinted += 1
        return Outcome(f"Hint {n + 1} of {len(self.problem.hints)}", self.problem.hints[n])

    def solution(self):
        """Show one way to do it, as code to read and run."""
        from IPython.display import display

        source = self.problem.solution
        display({"text/plain": source, "text/markdown": f"```python\n{source}\n```"}, raw=True)

    def __repr__(self):
        return f"Question {self.id}: {self.problem.task}"

    def html(self) -> str:
        return f"<p><b>Question {self.id}</b> {escape(self.problem.task)}</p>"
