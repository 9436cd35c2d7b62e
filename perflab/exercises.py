"""The exercises of the course by their number: "02.1" is the first of notebook 02. Each lives in its chapter's room."""

import importlib
from collections.abc import Iterable

from perflab.errors import PerflabError
from perflab.learn.question import Problem, Question

_ROOMS = {
    "00": "start.exercises",
    "01": "loading.exercises_01",
    "02": "loading.exercises_02",
    "03": "loading.exercises_03",
    "04": "launch.exercises",
    "05": "roofline.exercises",
    "06": "trace.exercises",
}


def problems(chapters: Iterable[str] = tuple(_ROOMS)) -> dict[str, Problem]:
    """The problems of the chapters with these two digits, by id; all of the course without."""
    rooms = [importlib.import_module(f"perflab.{_ROOMS[digits]}") for digits in chapters]
    return {id: problem for room in rooms for id, problem in room.PROBLEMS.items()}


def question(id: str) -> Question:
    """The exercise `id`, such as "00.1". Raises PerflabError naming those that exist.

    >>> question("00.1")  # doctest: +ELLIPSIS
    Question 00.1: A step takes 100 ms: ...
    """
    known = problems([str(id)[:2]]) if str(id)[:2] in _ROOMS else {}
    if id not in known:
        raise PerflabError(f"There is no question {id}: the course has {', '.join(problems())}.")
    return Question(id, known[id])
