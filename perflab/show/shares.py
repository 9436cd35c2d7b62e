"""Shares of a whole as one bar."""

from collections.abc import Mapping, Sequence

from perflab.bench.estimate import Estimate

from . import style


@style.styled
def bar(rows: Mapping[str, Mapping[str, Estimate]], parts: Sequence[str], whole: str = "one step") -> style.Picture:
    """One stacked bar per row, each part labelled with its share; the parts add up to the whole.

    rows: name of the bar -> name of the part -> its share, 0 to 1. A part keeps its colour everywhere.
    """
    fig, ax = style.figure(height=1.3 + 0.55 * len(rows))
    colours = dict(zip(parts, style.PARTS, strict=False))
    for y, shares in enumerate(rows.values()):
        left = 0.0
        for part, share in shares.items():
            ax.barh(y, share.mid, left=left, color=colours[part], height=0.62, edgecolor="white")
            if share.mid > 0.08:
                ax.text(
                    left + share.mid / 2, y, f"{share.mid:.0%}", ha="center", va="center", color="black", fontsize=10
                )
            left += share.mid
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    ax.set_xlabel(f"share of {whole}")
    ax.grid(visible=False)
    swatches = [ax.barh(0, 0, color=colours[p]) for p in parts]
    ax.legend(swatches, parts, ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1.0))
    return style.Picture.of(fig, f"shares of {whole}, one bar a machine.")
