"""How the copies of notebook 03 are shown: ways by size, and where the figures of a study come from."""

import html
from collections.abc import Sequence

from perflab.bench import machine, record
from perflab.bench.result import Result
from perflab.bench.units import nbytes_of, quantity, step_of
from perflab.show import style, table


class Origin(table.Answer):
    """Where the figures of a Result come from. Its plain text is the same on every machine."""

    def __init__(self, result: Result):
        self.result = result

    def __str__(self):
        where, asked = machine.named(self.result.machine), "; ".join(self.result.asked)
        if self.result.source != "here":
            return (
                f"Not measured here{f' ({asked})' if asked else ''}. The figures of this notebook are those recorded "
                f"on {self.result.source}: {where}. They say nothing about your machine."
            )
        if not self.result.measured:
            return f"Nothing is measured here ({asked or self.result.stopped}), so that no verdict below can tell."
        return f"The figures of this notebook are measured here: {where}."

    def __repr__(self):
        return f"Where the figures of {self.result.study} come from"

    def html(self) -> str:
        colour = "inherit" if self.result.source == "here" else style.RECORDED
        return f'<p style="color:{colour}"><b>{html.escape(str(self))}</b></p>'


def by_size(result: Result, ways: Sequence[str], sizes: Sequence[str], bound: float | None = None):
    """Show a study of `transfer.grid(ways, sizes)`: a table with a row a size, and bytes/s over the size.

    `bound` is a dashed line in bytes/s. Recorded machines stand beside it in grey.
    """
    from IPython.display import display

    rows = [{"size": size} | {way: _time_and_rate(result, f"{way} {size}") for way in ways} for size in sizes]
    display({"text/plain": repr(result), "text/html": table.table(rows, [result.provenance])}, raw=True)
    results = [r for r in (*record.beside(result), result) if r.measured]
    if results:
        display(_figure(result, results, ways, sizes, bound))


def _time_and_rate(result: Result, value: str) -> table.Html:
    time, rate = result["time_s"].of(value), result["bytes_per_s"].of(value)
    if why := result.reasons.get(value, time.why):
        return table.Html(html.escape(why))
    return table.Html(f"{time}<br>{quantity(rate.mid, rate.unit)}")


@style.styled
def _figure(
    result: Result, results: Sequence[Result], ways: Sequence[str], sizes: Sequence[str], bound: float | None
) -> style.Picture:
    """bytes/s over bytes, both on log axes, a line a way; of `results`, those beside `result` in grey."""
    fig, ax = style.figure(height=4.0)
    factor, unit = step_of(1e9, "bytes/s")
    for number, way in enumerate(ways):
        colour, marker = style.PARTS[number % 6], "osv^Dh"[number % 6]
        for r in results:
            measured = [size for size in sizes if f"{way} {size}" in r.measured]
            xs = [nbytes_of(size) for size in measured]
            rates = [r["bytes_per_s"].of(f"{way} {size}") for size in measured]
            ys = [rate.mid / factor for rate in rates]
            if r is result:
                ax.plot(xs, ys, f"{marker}-", color=colour, markersize=5, label=way, zorder=3)
                limits = ([rate.lo / factor for rate in rates], [rate.hi / factor for rate in rates])
                ax.fill_between(xs, *limits, color=colour, alpha=0.2, linewidth=0)
            else:
                name = r.source if way == ways[0] else None
                ax.plot(xs, ys, "-", color=style.RECORDED, linewidth=1, label=name)
    if bound is not None and bound > 0:
        ax.axhline(bound / factor, color=style.BOUND, linestyle="--", label="the bus")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([nbytes_of(size) for size in sizes], sizes)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel("bytes a copy")
    ax.set_ylabel(unit)
    ax.legend(loc="lower right")
    if result.source != "here":
        ax.set_title(f"recorded on {result.source}", color=style.RECORDED)
    over = f"{unit} over the size of a copy, {', '.join(sizes)}, for {', '.join(ways)}"
    return style.Picture.of(fig, f"{over}; bands are 95 % intervals over the rounds, the bus is dashed.")
