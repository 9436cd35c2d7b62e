"""Files that are whole or absent, however many processes write and whenever one is killed."""

import itertools
import os
from pathlib import Path

_number = itertools.count()


def put(path: Path, content: bytes):
    """Write the file under another name and rename it; no part of it is ever seen. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{next(_number)}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
