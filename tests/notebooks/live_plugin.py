"""A plugin for nbval in a live run: what holds measured figures is left out, all else is compared."""

LEFT_OUT = ("text/html", "stderr")


def pytest_collectstart(collector) -> None:
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += LEFT_OUT
