"""Exercises: a question that can be checked, hinted at and solved. It never raises at the learner."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass

from perflab.errors import PerflabError

CORRECT, INCORRECT, NOT_YET, CANNOT = "Correct", "Not right", "Not yet", "CANNOT TELL"


@dataclass(frozen=True)
class Outcome:
    """What a check says: one of the four words, and a sentence."""

    state: str
    sentence: str = ""

    def __repr__(self):
        return f"{self.state}: {self.sentence}" if self.sentence else f"{self.state}."

    def _repr_mimebundle_(self, include=None, exclude=None):
        colour = {CORRECT: "#00795a", INCORRECT: "#b34700"}.get(self.state, "#5a5a5a")
        shown = f'<p><b style="color:{colour}">{self.state}</b> {html.escape(self.sentence)}</p>'
        return {"text/plain": repr(self), "text/html": shown}


def as_number(answer) -> float:
    """The answer as a number; nan where it is none, such as a text, a list or True."""
    try:
        return math.nan if isinstance(answer, bool | str) else float(answer)
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class Problem:
    """What an author writes: the task, the check of an answer, hints, and a solution as source text."""

    task: str
    check: Callable[[object], Outcome]
    hints: tuple[str, ...]
    solution: str


class Question:
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

    def _repr_mimebundle_(self, include=None, exclude=None):
        shown = f"<p><b>Question {self.id}</b> {html.escape(self.problem.task)}</p>"
        return {"text/plain": repr(self), "text/html": shown}


def question(id: str) -> Question:
    """The exercise `id`, such as "00.1". Raises PerflabError naming those that exist."""
    from .problems import PROBLEMS

    if id not in PROBLEMS:
        raise PerflabError(f"There is no question {id}: the course has {', '.join(PROBLEMS)}.")
    return Question(id, PROBLEMS[id])
