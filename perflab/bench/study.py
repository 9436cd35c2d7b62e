"""`vary` and `observe`: change one variable, measure it in interleaved rounds, keep what was seen."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perflab.errors import PerflabError

from . import interrupt, machine, record
from .plan import Job, plain, plan
from .progress import shell
from .result import TWIN, Result, Work, label
from .schedule import Schedule


def here(job: Job) -> Result:
    """Run the schedule in this process: the default `where` of `vary`.

    A `where` takes a Job and returns its Result, `stopped == "interrupted"` after an interrupt. `fresh()`
    is another. `ranks(n)` will be a third: the whole schedule inside torchrun's ranks, rank 0 deciding
    when to stop, each time the slowest rank's.
    """
    schedule = Schedule(job)
    result = schedule.go()
    if schedule.raised:
        record.keep(result)
        raise schedule.raised
    return result


def vary(
    variable: str,
    values: Sequence | Mapping[str, object],
    run: Callable,
    *,
    study: str | None = None,
    prepare: Callable | None = None,
    counts: Callable | None = None,
    per: str | None = None,
    work: Work = 1,
    shows: Sequence[str] = (),
    fixed: dict | None = None,
    needs: Sequence[str] = (),
    where: Callable[[Job], Result] = here,
    keep: bool = True,
    clock: str = "wall",
    version: int = 1,
    budget_s: float | None = None,
) -> Result:
    """Change one variable and time `run` at each of its values, in interleaved rounds of random order.

    values: a list, or a mapping from label to what `prepare` or `run` receives.
    run(prepared): what is timed, in seconds a call. It may return `samples(wait_s=...)`, its own clocks.
    prepare(value): builds what `run` is timed on; may be a context manager. Default: the value itself.
    counts(prepared): exact figures by name, taken twice outside the timing; they must agree.
    per, work: what one call handles ("image", 64), for rates; `work` may be a function of the value.
    shows: the metrics that the figure shows, of one unit; by default the rate, or the time.
    fixed: labels that tell variants of a study apart.
    needs: "cuda", "2 cuda", "compiler" or a package; unmet, a recorded result stands in and says so.
    where: `here`, or `fresh()` for what may spoil its process.
    keep: True holds all prepared values at once; False builds and closes one per visit.
    clock: "wall" (host seconds, the device synchronised) or "device" (CUDA events, L2 cold).
    version: raise it when the study changes its meaning. budget_s: seconds, instead of the budget's own.

    A value that fails is a row with its reason. Raises PerflabError for a call that cannot be measured,
    and KeyboardInterrupt after an interrupt, when what was measured is logged and shown.

    >>> vary("n", [1, 2], lambda n: sum(range(n)), study="own.sum", keep=False)  # doctest: +ELLIPSIS
    Result own.sum: n = 1, 2...
    """
    _checked_name(study, "vary")
    named = _named(values)
    if clock not in ("wall", "device"):
        raise PerflabError(f'clock={clock!r} is unknown: use "wall" or "device".')
    chosen = plan() if budget_s is None else replace(plan(), budget_s=budget_s)
    job = Job(
        study,
        version,
        variable,
        named,
        run,
        prepare=prepare,
        counts=counts,
        per=per,
        work=work,
        shows=(shows,) if isinstance(shows, str) else tuple(shows),
        fixed=_labels(fixed),
        keep=keep,
        clock=clock,
        plan=chosen,
    )
    needs = [needs] if isinstance(needs, str) else list(needs)
    needs += ["cuda"] * (clock == "device")
    if not all(job.work_of(name) > 0 for name in named):
        raise PerflabError(f"work={work!r} is what one call handles, and must be above zero.")
    if (known := _replayed(job, needs)) is not None:
        return known
    result = where(job)
    record.keep(result)
    if result.stopped == "interrupted":
        _show(result)
        raise KeyboardInterrupt
    return result


def observe(
    study: str,
    rows: Mapping[str, Mapping] | Callable[[], Mapping[str, Mapping]],
    *,
    variable: str = "what",
    timed: Sequence[str] = (),
    fixed: dict | None = None,
    needs: Sequence[str] = (),
    version: int = 1,
) -> Result:
    """Keep what is not a sweep: a map, a ledger, facts. `rows` maps a label to columns of numbers or text.

    Columns named in `timed` were measured: they are left out of the stable text. With `needs`, give a
    function, so that nothing is computed where they are unmet.

    >>> observe("own.sizes", {"photo": {"pixels": 4096}})
    Result own.sizes: what = photo
      photo: pixels 4,096
    """
    _checked_name(study, "observe")
    job = Job(study, version, variable, {}, rows if callable(rows) else observe, fixed=_labels(fixed))
    if (known := _replayed(job, needs)) is not None:
        return known
    if callable(rows):
        with interrupt.Interruptible() as door:  # it may start workers, which an interrupt must not leave behind
            rows = door.call(rows)
    result = job.empty()
    for name, columns in rows.items():
        result.values.append(label(name))
        for column, x in plain(columns).items():
            if column in timed:
                result.samples.setdefault(column, {})[label(name)] = [(0, [float(x)])]
            else:
                result.counts.setdefault(label(name), {})[column] = x
    result.stopped = "observed"
    record.keep(result)
    return result


def _checked_name(study: str | None, who: str):
    if not isinstance(study, str) or not re.fullmatch(r"[\w.-]{1,80}", study):
        raise PerflabError(
            f'{who} needs a name under which its result is kept: study="01.decode" '
            f"(letters, digits, dots and dashes), not {study!r}."
        )


def _labels(fixed: dict | None) -> dict:
    try:
        return json.loads(json.dumps(dict(fixed or {})))
    except (TypeError, ValueError):
        raise PerflabError(f"fixed={fixed!r} must map labels to numbers or text: write str(x) for the rest.") from None


def _named(values) -> dict[str, object]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise PerflabError(f"The values are a list or a mapping from label to value, not {values!r}.")
    pairs = list(values.items()) if isinstance(values, Mapping) else [(v, v) for v in values]
    named = {label(name): value for name, value in pairs}
    if not named:
        raise PerflabError("vary needs at least one value.")
    if bad := [name for name in named if name != name.strip() or name.endswith(TWIN)]:
        raise PerflabError(f"The label {bad[0]!r} begins or ends with a space or with {TWIN!r}: take another.")
    if len(named) < len(pairs):
        raise PerflabError(f"Two values have the same label among {', '.join(label(n) for n, _ in pairs)}.")
    return named


def _replayed(job: Job, needs: Sequence[str]) -> Result | None:
    """The result that stands for this job without measuring: a replay, a stand-in, a resumed one."""
    found = _found(job, [why for need in needs if (why := machine.missing(need))])
    if found is not None:
        found.shows = list(job.shows)
    return found


def _found(job: Job, unmet: list[str]) -> Result | None:
    asked = job.study, job.version, job.fixed
    if name := record.replayed_machine():
        if found := record.recorded(name, *asked):
            return found
        raise PerflabError(
            f"{job.study} is not recorded on {name}: unset PERFLAB_MACHINE to measure it here, or run "
            "make record on that machine."
        )
    if not unmet:
        return record.resumed(*asked, job.digest)
    for name in record.machines():
        if found := record.recorded(name, *asked):
            found.asked = unmet
            return found
    bare = job.empty()
    bare.reasons = {v: "; ".join(unmet) for v in bare.values}
    bare.asked, bare.stopped = [*unmet, "no machine is recorded for this study"], "not measured"
    return bare


def _show(result: Result):
    if shell():
        sys.modules["IPython"].display.display(result)
    else:
        print(result)
