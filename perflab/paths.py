"""Where the course lies and where it keeps what a learner measures. Only paths; nothing is written here."""

import os
from pathlib import Path

COURSE = Path(__file__).resolve().parent.parent
DATA = COURSE / "data"
NOTEBOOKS = COURSE / "notebooks"
RECORDED = DATA / "recorded"


def home() -> Path:
    """The learner's own folder: `$PERFLAB_HOME`, else `perflab` below the user's data folder (XDG)."""
    if chosen := os.environ.get("PERFLAB_HOME"):
        return Path(os.path.expanduser(chosen))
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.path.expanduser(data)) / "perflab"
