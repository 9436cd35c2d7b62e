"""How the copies of notebook 03 are shown: ways by size, and where the figures of a study come from."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from perflab.bench import machine, record
from perflab.bench.result import Result
from perflab.bench.units import quantity, step_of
from perflab.show import style

from .transfer import nbytes_of


@dataclass(frozen=True)
class Origin:
    """Where the figures of a Result come from. Its plain text is the same on every machine."""

    result: Result

    @property
    def sentence(self) -> str:
        r = self.result
        if r.source != "here":
            why = f" ({'; '.join(r.asked)})" if r.asked else ""
            return (
                f"Not measured here{why}. The figures of this notebook are those recorded on {r.source}: "
                f"{machine.named(r.machine)}. They say nothing about your machine."
            )
        if not r.measured:
            return f"Nothing is measured here ({'; '.join(r.asked) or r.stopped}), so that no verdict below can tell."
        return f"The figures of this notebook are measured here: {machine.named(r.machine)}."

    def __repr__(self):
        return f"Where the figures of {self.result.study} come from"

    def _repr_mimebundle_(self, include=None, exclude=None):
        colour = "inherit" if self.result.source == "here" else style.RECORDED
        shown = f'<p style="color:{colour}"><b>{html.escape(self.sentence)}</b></p>'
        return {"text/plain": repr(self), "text/html": shown}


def by_size(result: Result, ways: Sequence[str], sizes: Sequence[str], bound: float | None = None):
    """Show a study of `transfer.grid(ways, sizes)`: a table with a row a size, and bytes/s over the size.

    `bound` is a dashed line in bytes/s. Recorded machines stand beside it in grey.
    """
    from IPython.display import display

    display({"text/plain": repr(result), "text/html": size_table(result, ways, sizes)}, raw=True)
    beside = record.beside(result)
    if any(r.measured for r in (result, *beside)):
        display(size_figure(result, ways, sizes, beside, bound))


def size_table(result: Result, ways: Sequence[str], sizes: Sequence[str]) -> str:
    """As HTML: the time of one copy with its interval, and its rate."""
    rows = [
        "<table><thead><tr><th>size</th>",
        *(f"<th>{html.escape(way)}</th>" for way in ways),
        "</tr></thead><tbody>",
    ]
    for size in sizes:
        rows.append(f"<tr><td>{size}</td>")
        for way in ways:
            time, rate = (result[m].of(f"{way} {size}") for m in ("time_s", "bytes_per_s"))
            why = html.escape(result.reasons.get(f"{way} {size}", time.why))
            text = why or f"{time}<br>{quantity(rate.mid, rate.unit)}"
            rows.append(f"<td>{text}</td>")
        rows.append("</tr>")
    return "".join([*rows, "</tbody></table>", f"<p><small>{html.escape(result.provenance)}</small></p>"])


@style.styled
def size_figure(
    result: Result, ways: Sequence[str], sizes: Sequence[str], beside: Sequence[Result], bound: float | None
) -> style.Picture:
    """bytes/s over bytes, both on log axes, a line a way; recorded machines in grey."""
    fig, ax = style.figure(height=4.0)
    factor, unit = step_of(1e9, "bytes/s")
    for k, way in enumerate(ways):
        for r in (*beside, result):
            points = [(nbytes_of(s), r["bytes_per_s"].of(f"{way} {s}")) for s in sizes]
            points = [(x, e) for x, e in points if not e.why]
            if not points:
                continue
            xs, ys = [x for x, _ in points], [e.mid / factor for _, e in points]
            if r is result:
                ax.plot(xs, ys, "osv^Dh"[k % 6] + "-", color=style.PARTS[k % 6], markersize=5, label=way, zorder=3)
                ends = [(e.lo / factor, e.hi / factor) for _, e in points if e.n >= 6]
                if len(ends) == len(xs):
                    ax.fill_between(xs, *zip(*ends, strict=True), color=style.PARTS[k % 6], alpha=0.2, linewidth=0)
            else:
                ax.plot(xs, ys, "-", color=style.RECORDED, linewidth=1, label=r.source if k == 0 else None)
    if bound is not None and bound > 0:
        ax.axhline(bound / factor, color=style.BOUND, linestyle="--", label="the bus")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([nbytes_of(s) for s in sizes], sizes)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel("bytes a copy")
    ax.set_ylabel(unit)
    ax.legend(loc="lower right")
    if result.source != "here":
        ax.set_title(f"recorded on {result.source}", color=style.RECORDED)
    over = f"{unit} over the size of a copy, {', '.join(sizes)}, for {', '.join(ways)}"
    return style.Picture.of(fig, f"{over}; bands are 95 % intervals over the rounds, the bus is dashed.")
