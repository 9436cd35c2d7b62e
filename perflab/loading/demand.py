"""What a model asks of its loader, against what measured loaders deliver."""

import ipywidgets as widgets

from perflab.bench.result import Result
from perflab.bench.units import digits
from perflab.show import style
from perflab.show.explorer import Explorer


def explore_workers(**sweeps: Result) -> Explorer:
    """Replays measured sweeps, named by keyword: rate over workers per core, beside the rate that a model asks.

    sweeps: Results whose values are numbers and whose `per` is "image".
    """

    def draw(ax, regime: str, wanted: float) -> str:
        result = sweeps[regime]
        rates = {f"{float(v):g}": result["images_per_s"].of(v) for v in result.measured}
        if not rates:
            ax.set_axis_off()
            return f"Nothing was measured: {'; '.join(result.asked) or result.stopped}."
        best = max(rate.mid for rate in rates.values())
        here = result.source == "here"
        for k, rate in enumerate(rates.values()):
            colour = style.HERE if here else style.RECORDED
            ax.bar(k, rate.mid, color=colour, alpha=1 if rate.mid >= wanted else 0.35, width=0.6)
            if rate.lo > 0 and rate.hi < float("inf"):
                ax.errorbar([k], [rate.mid], [[rate.mid - rate.lo], [rate.hi - rate.mid]], color="black", capsize=3)
        ax.set_ylim(0, 1.25 * (max(best, wanted) if wanted < 4 * best else best))
        ax.axhline(wanted, color=style.BOUND, linestyle="--")
        across, plate = ax.get_yaxis_transform(), {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        ax.text(0.995, wanted, "asked for", color=style.BOUND, transform=across, ha="right", va="bottom", bbox=plate)
        ax.set_xticks(range(len(rates)), rates)
        ax.set_xlabel(f"{result.variable} ({result.machine.get('cores', '?')} cores)")
        ax.set_ylabel("images/s")
        ax.set_title(f"{regime}: {'measured here' if here else f'recorded on {result.source}'}")
        enough = next((workers for workers, rate in rates.items() if rate.mid >= wanted), None)
        if enough is None:
            return f"None of these feeds {digits(wanted)} images/s: the best gives {best / wanted:.0%} of it."
        return f"{enough} workers per core feed {digits(wanted)} images/s: more of them only cost memory."

    return Explorer(
        draw,
        "measured rates of loading over the number of workers; dashed is the rate that a model asks for.",
        regime=widgets.Dropdown(options=list(sweeps), description="regime"),
        wanted=widgets.FloatLogSlider(300, base=10, min=1, max=5, step=0.05, description="images/s asked for"),
    )
