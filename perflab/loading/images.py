"""The images that the notebooks use: the course's own, or the learner's folder; and a Dataset over them.

DataLoader workers import this file: torch, numpy and PIL may enter, nothing that draws or teaches.
"""

import functools
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from perflab.bench.machine import cores
from perflab.bench.progress import bar
from perflab.errors import PerflabError

from .synthetic import SIZES, make

OWN_LIMIT = 512


@dataclass(frozen=True)
class Images:
    """The images to use, the files left out as (name, reason), and where they come from, without a path.

    >>> images("1080p")
    32 images, synthetic 1080p
    """

    paths: tuple[Path, ...]
    skipped: tuple[tuple[str, str], ...]
    origin: str

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        left_out = f"; left out: {_few(self.skipped)}" if self.skipped else ""
        return f"{len(self)} images, {self.origin}{left_out}"


def images(size: str = "500x375", limit: int | None = None) -> Images:
    """The images of one of SIZES, at most `limit`; the quick set is made first if it is missing.

    With PERFLAB_IMAGES=/path they are the learner's own, of whatever size: the first `limit` (or 512) of
    the folder and the folders in it, each decoded once to leave out what cannot be read. Raises
    PerflabError if the folder has no readable image, or if the course's own cannot be made.
    """
    if size not in SIZES:
        raise PerflabError(f"there are no images of size {size!r}; choose one of {', '.join(SIZES)}")
    if limit is not None and limit < 1:
        raise PerflabError(f"limit={limit} leaves no image; give 1 or more, or None for all")
    if own := os.environ.get("PERFLAB_IMAGES"):
        return _own(Path(os.path.expanduser(own)), limit or OWN_LIMIT)
    paths = sorted((make() / size).glob("*.jpg"))
    return Images(tuple(paths[:limit]), (), f"synthetic {size}")


def _own(folder: Path, limit: int) -> Images:
    advice = "give a folder of JPEG or PNG files, or unset PERFLAB_IMAGES to use the course's own"
    try:
        os.listdir(folder)
        changed = folder.stat().st_mtime_ns
    except OSError as fault:
        raise PerflabError(f"PERFLAB_IMAGES={folder} cannot be opened ({fault.strerror}); {advice}") from None
    own = _readable(folder.resolve(), limit, changed)
    if not own.paths:
        what = f"no readable image ({_few(own.skipped)})" if own.skipped else "no file"
        raise PerflabError(f"PERFLAB_IMAGES={folder} holds {what}; {advice}")
    return own


@functools.cache
def _readable(folder: Path, limit: int, changed: int) -> Images:
    """The first `limit` readable images below the folder; `changed` marks its state."""
    paths, skipped = [], []
    with bar("your images", "images") as progress:
        for path, fault in _files(folder):
            progress.update()
            if fault:
                skipped.append((str(path.relative_to(folder)), fault))
            else:
                paths.append(path)
            if len(paths) == limit:
                break
    return Images(tuple(paths), tuple(skipped), "your folder")


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file below that is not hidden, sorted folder by folder, with its fault; 64 at a time, on all cores."""
    with ThreadPoolExecutor(cores()) as pool:
        for where, inner, names in os.walk(folder):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            shown = [Path(where, name) for name in sorted(names) if not name.startswith(".")]
            for start in range(0, len(shown), 64):
                files = list(filter(Path.is_file, shown[start : start + 64]))
                yield from zip(files, pool.map(_fault, files), strict=True)


def _fault(path: Path) -> str:
    """Why the file cannot serve, empty if it can. An eighth of the size is decoded, from all of its bytes."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))
            image.convert("RGB")
        return ""
    except UnidentifiedImageError:
        return "not an image"
    except Exception as fault:  # PIL's decoders raise many types on broken files
        return _reason(fault)


def _reason(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__


def _few(skipped: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return ", ".join(f"{name}: {reason}" for name, reason in skipped[:3]) + more


class StagedPhotos(torch.utils.data.Dataset):
    """Item i is (uint8 tensor (3, side, side), label i % 10), made in three stages: read, decode, resize.

    The file is read, decoded by PIL and made RGB; then the short side becomes `side` (bilinear) and the
    long side is cut at its centre. The files are those of `images(size, limit)`, or `paths`. Only paths
    are kept, so the dataset travels cheaply to a worker. An item whose file cannot be read any more raises
    PerflabError with its name.
    """

    def __init__(
        self,
        size: str = "500x375",
        side: int = 224,
        limit: int | None = None,
        paths: Sequence[str | Path] | None = None,
    ):
        if side < 1:
            raise PerflabError(f"side={side} pixels leaves no image; give 1 or more")
        if paths is None:
            paths = images(size, limit).paths
        if not paths:
            raise PerflabError("paths is empty; give at least one image file, or leave it out")
        self.paths = tuple(map(str, paths))
        self.side = side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        try:
            return self.resize(self.decode(self.read(index))), index % 10
        except Exception as fault:  # decoders raise many types on broken files
            advice = "restore it, or restart the notebook to choose the images anew"
            raise PerflabError(f"{path} cannot be read any more ({_reason(fault)}); {advice}") from fault

    def read(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def decode(self, data: bytes):
        """All pixels of the file."""
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")

    def resize(self, image) -> torch.Tensor:
        square = ImageOps.fit(image, (self.side, self.side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.asarray(square).transpose(2, 0, 1).copy())
