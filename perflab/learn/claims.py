"""The source's statements, what is right, and the verdict of this machine on each."""

import functools
import html
import time
import tomllib
from dataclasses import asdict, dataclass

from perflab import paths
from perflab.bench import record
from perflab.bench.estimate import CANNOT, HOLDS, Finding
from perflab.errors import PerflabError
from perflab.show.table import Answer, table

_COLOURS = {HOLDS: "#00795a", CANNOT: "#7a7a7a"}


@dataclass(frozen=True)
class Claim:
    """One statement of the source article, in our words, and what is right.

    `judged` says how a notebook decides it; `untested` says why nothing can, and then no notebook does.
    """

    id: str
    says: str
    right: str
    source: str
    notebook: str
    judged: str = ""
    untested: str = ""


@functools.cache
def ledger() -> dict[str, Claim]:
    """All claims of data/claims.toml by id."""
    text = (paths.DATA / "claims.toml").read_text(encoding="utf8")
    claims = [Claim(**entry) for entry in tomllib.loads(text)["claim"]]
    return {c.id: c for c in claims}


@dataclass(frozen=True)
class Verdict(Answer):
    """A finding on a claim as it stands in the source."""

    claim: Claim
    finding: Finding

    @property
    def state(self) -> str:
        """The finding's state; of a recorded machine's figures it does not say HERE."""
        return _where(self.finding.state, self.finding.source)

    def __repr__(self):
        """Stable: a timed verdict differs between machines, so that only its rule is shown."""
        word = self.finding.state.removesuffix(" HERE") if self.finding.exact else "timed"
        return f"judged {self.claim.id} ({word}): {self.finding.rule}"

    def __str__(self):
        return f"{self.claim.id} {self.state}: {self.finding.rule}; seen {self.finding.seen}"

    def html(self) -> str:
        colour = _COLOURS.get(self.finding.state, "#b34700")
        rule, seen = html.escape(self.finding.rule), html.escape(self.finding.seen)
        return (
            f'<div style="border-left:4px solid {colour};padding:2px 12px">'
            f"<p><b>{self.claim.id}</b> The source says: {html.escape(self.claim.says)}</p>"
            f'<p><b style="color:{colour}">{self.state}</b> Rule: {rule}. Seen: {seen}.</p>'
            f"<p>What is right: {html.escape(self.claim.right)}</p></div>"
        )


def _where(state: str, source: str) -> str:
    return state if source == "here" else state.replace("HERE", f"ON {source}")


def judge(id: str, finding: Finding) -> Verdict:
    """The verdict on claim `id`, kept in the logbook. Raises PerflabError for an unknown claim or one that
    the ledger calls untestable.

    >>> judge("C1-1", sweep.ratio(16, 0).at_least(4))  # doctest: +SKIP
    """
    if id not in ledger():
        near = ", ".join(c for c in ledger() if c.startswith(id.partition("-")[0] + "-"))
        raise PerflabError(f"There is no claim {id}{f': the ledger has {near}' if near else ' in the ledger'}.")
    judged = ledger()[id]
    if judged.untested:
        raise PerflabError(f"{id} is not judged: {judged.untested}")
    if not isinstance(finding, Finding):
        raise PerflabError(f"judge({id!r}, ...) takes a finding, such as result.ratio(a, b).at_least(1.2).")
    verdict = Verdict(judged, finding)
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    record.append("verdicts", id, {"claim": id, **asdict(finding), "taken": taken})
    return verdict


@dataclass(frozen=True)
class Card(Answer):
    """The latest verdict on every claim."""

    verdicts: list[dict]

    def __repr__(self):
        return f"Card of {len(self.verdicts)} claims"

    def __str__(self):
        return "\n".join(f"{row['claim']:8} {row['verdict']}" for row in self.verdicts)

    def rows(self) -> list[dict]:
        return self.verdicts

    def html(self) -> str:
        return table(self.verdicts)


def card() -> Card:
    """Every claim with this learner's latest verdict, and the reason where there is none.

    >>> card()  # doctest: +ELLIPSIS
    Card of ... claims
    """
    latest = {entry["claim"]: entry for entry in record.entries("verdicts")}
    verdicts = []
    for c in ledger().values():
        entry = latest.get(c.id, {})
        state = entry.get("state") or ("TEXT ONLY" if c.untested else "not judged yet")
        verdict = _where(state, entry.get("source", "here"))
        verdicts.append({"claim": c.id, "the source says": c.says, "verdict": verdict, "notebook": c.notebook})
    return Card(verdicts)
