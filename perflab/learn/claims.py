"""The ledger of common advice: what is often said, what is right, and what this machine says of it."""

import functools
import html
import tomllib
from dataclasses import asdict, dataclass, replace

from perflab import paths
from perflab.bench import record
from perflab.bench.estimate import CANNOT, HOLDS, NOT, Finding
from perflab.errors import PerflabError
from perflab.show.table import Answer

PART, NOT_TESTABLE = "HOLDS IN PART", "NOT TESTABLE"
COLOURS = {HOLDS: "#00795a", PART: "#8a6d00", NOT: "#b34700", CANNOT: "#7a7a7a"}
EXACT_WORDS = {HOLDS: "True", PART: "Partly true", NOT: "Not true", CANNOT: "Cannot tell"}


@dataclass(frozen=True)
class Claim:
    """One statement of the source article, restated in our words, and what is right.

    `fair_test` says what is measured and when the statement holds, `why_not` why one machine cannot test it
    fairly. A statement with `box` is shown in its notebook, with one sentence of advice, `so`.
    """

    id: str
    section: str
    kind: str
    notebook: str
    says: str
    right: str
    fair_test: str = ""
    why_not: str = ""
    box: bool = False
    so: str = ""

    @property
    def testable(self) -> bool:
        return bool(self.fair_test)


@functools.cache
def ledger() -> dict[str, Claim]:
    """All claims of data/claims.toml by id, in the order of the source."""
    entries = tomllib.loads((paths.DATA / "claims.toml").read_text(encoding="utf8"))["claim"]
    return {entry["id"]: Claim(**entry) for entry in entries}


@dataclass(frozen=True)
class Verdict(Answer):
    """What a finding says of a claim, shown as a box: often said, measured, so."""

    claim: Claim
    finding: Finding

    def __repr__(self):
        """Stable: a timed verdict differs between machines, so that only its rule is shown."""
        word = self.finding.state.removesuffix(" HERE") if self.finding.exact else "timed"
        return f"judged {self.claim.id} ({word}): {self.finding.rule}"

    def __str__(self):
        return f"{self.claim.id} {_for_card(self.claim, asdict(self.finding))}: {self.finding.rule}"

    def html(self) -> str:
        claim, colour = self.claim, COLOURS[self.finding.state]
        lines = {"Often said": claim.says, "Measured": _measured(self.finding), "So": claim.so or claim.right}
        if not claim.testable:
            lines, colour = {"Often said": claim.says, "Not testable:": claim.why_not}, COLOURS[CANNOT]
        body = "".join(f"<p><b>{label}</b> {html.escape(text)}</p>" for label, text in lines.items())
        style = f"border-left:4px solid {colour};padding:2px 12px"
        return f'<div role="note" title="{html.escape(str(self))}" style="{style}">{body}</div>'


def _measured(finding: Finding) -> str:
    """The verdict in words, with its figure. What was counted or worked out needs no machine's name."""
    machine = "this machine" if finding.source == "here" else finding.source
    words = f"{finding.state.removesuffix(' HERE').capitalize()} on {machine}"
    return f"{EXACT_WORDS[finding.state] if finding.exact else words}: {finding.seen}."


def _for_card(claim: Claim, entry: dict) -> str:
    """The state that an entry of the logbook has on the card. A timed one of a recorded machine says so."""
    if not claim.testable:
        return NOT_TESTABLE
    state, machine = entry.get("state", "not judged yet"), entry.get("source", "here")
    if entry.get("exact"):
        return state.removesuffix(" HERE")
    return state if machine == "here" else f"{state.removesuffix(' HERE')} ON {machine}"


def judge(id: str, finding: Finding, part: Finding | None = None) -> Verdict:
    """The verdict on claim `id`, kept in the logbook if it is testable. Raises PerflabError for an unknown `id`.

    part: a weaker finding. Where `finding` does not hold and `part` does, the claim HOLDS IN PART.

    >>> judge("C2.2-2", flight.count("made", "2 workers").equals(4))  # doctest: +SKIP
    """
    if id not in ledger():
        raise PerflabError(f"There is no claim {id}: data/claims.toml has those there are.")
    if part is not None:
        state = PART if (finding.state, part.state) == (NOT, HOLDS) else finding.state
        finding = replace(finding & part, state=state, rule=f"{finding.rule}, or in part {part.rule}")
    if ledger()[id].testable:
        record.append("verdicts", id, {"claim": id} | asdict(finding))
    return Verdict(ledger()[id], finding)


class Card(Answer):
    """Every statement of the source with this learner's latest verdict on it."""

    def __repr__(self):
        return f"Card of {len(ledger())} claims"

    def rows(self) -> list[dict]:
        latest = {entry["claim"]: entry for entry in record.entries("verdicts")}
        verdicts = {id: _for_card(claim, latest.get(id, {})) for id, claim in ledger().items()}
        return [
            {"section": claim.section, "often said": claim.says, "verdict": verdicts[id], "notebook": claim.notebook}
            for id, claim in ledger().items()
        ]


def card() -> Card:
    """Every statement of the source with this learner's latest verdict on it.

    >>> card()
    Card of 155 claims
    """
    return Card()
