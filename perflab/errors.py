"""The one error that this package raises on purpose. Nothing else may enter."""


class PerflabError(Exception):
    """What went wrong and how to go on, in one sentence that a learner can act on.

    A notebook shows the sentence alone: the stack of this package helps nobody mend a
    wrong folder or a misspelt study.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"perflab: {self}"]
