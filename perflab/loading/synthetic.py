"""JPEG files with the statistics of photographs, made here: seeded, taken up where they were left."""

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from perflab import paths
from perflab.bench.files import put
from perflab.bench.machine import cores
from perflab.bench.progress import bar
from perflab.errors import PerflabError

SIZES = {"1080p": (1920, 1080), "500x375": (500, 375), "256px": (455, 256)}
QUICK = {"1080p": 32, "500x375": 128}
FULL = {"1080p": 256, "500x375": 1024}


def fractal(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A random field, float32 (height, width), standard deviation 1, whose amplitude spectrum falls as 1/f.

    Photographs have that spectrum (Field 1987, JOSA A 4:2379), so JPEG finds as much to code as in them.
    """
    frequency = np.hypot(np.fft.rfftfreq(width), np.fft.fftfreq(height)[:, None]).astype(np.float32)
    frequency[0, 0] = np.inf
    noise = rng.standard_normal((*frequency.shape, 2), dtype=np.float32).view(np.complex64)[..., 0]
    field = np.fft.irfft2(noise / frequency, s=(height, width))
    return (field / field.std()).astype(np.float32)


def leaves(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Shapes that hide one another, uint8 (height, width, 4): luminance, two chromas, texture contrast.

    The radii have density r^-3, the dead-leaves model of edges in photographs (Lee, Mumford and Huang
    2001, IJCV 41:35). Each is drawn small and enlarged, the far ones most, which makes their edges soft.
    """

    def paint() -> tuple[int, ...]:
        chroma = np.clip(rng.normal(128, 12, 2), 70, 186)
        return (int(rng.uniform(70, 190)), int(chroma[0]), int(chroma[1]), int(rng.uniform(40, 200)))

    canvas = Image.new("RGBA", (1, 1), paint())
    for count, scale in ((40, 8), (80, 4), (120, 2)):
        wide, high = width // scale, height // scale
        canvas = canvas.resize((wide, high), Image.Resampling.BILINEAR)
        draw = ImageDraw.Draw(canvas)
        for _ in range(count):
            x, y, flat = rng.uniform(0, wide), rng.uniform(0, high), rng.uniform(0.4, 1)
            across = 0.02 * high / np.sqrt(rng.uniform(0.0025, 1))
            down = across * flat
            if rng.uniform() < 0.5:
                draw.ellipse((x - across, y - down, x + across, y + down), fill=paint())
            else:
                angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 9)))
                corners = zip(x + across * np.cos(angles), y + down * np.sin(angles), strict=True)
                draw.polygon(list(corners), fill=paint())
    return np.asarray(canvas.resize((width, height), Image.Resampling.BILINEAR))


def picture(index: int, width: int, height: int) -> Image.Image:
    """Picture number `index`, mode YCbCr; index and size decide every pixel.

    Shapes and a 1/f texture in luminance, the same with a weaker texture at half resolution in chroma.
    """
    rng = np.random.default_rng([index, width, height])
    shapes = leaves(rng, width, height)
    bands = [shapes[..., 0] + shapes[..., 3] * fractal(rng, width, height) * 0.13]
    for chroma in (1, 2):
        weak = Image.fromarray(5 * fractal(rng, width // 2, height // 2))
        weak = weak.resize((width, height), Image.Resampling.BILINEAR)
        bands.append(shapes[..., chroma] + np.asarray(weak))
    return Image.merge("YCbCr", [Image.fromarray(np.clip(band, 0, 255).astype(np.uint8)) for band in bands])


def jpeg(image: Image.Image) -> bytes:
    """The image as a JPEG file, quality 90, chroma at half resolution (4:2:0)."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def make(quick: bool = True, folder: str | Path | None = None, counts: Mapping[str, int] | None = None) -> Path:
    """Make the course's images, or what is missing of them, and return their folder. A file that exists is whole.

    `<folder>/1080p/0000.jpg` and so on, `500x375/` likewise, and in `256px/` a small copy of each 1080p image.
    `counts` replaces the numbers of the quick or the full set; the quick set is the beginning of the full one.
    Without `folder` they lie in the course's data folder or, where that takes no file, in the learner's own.
    Raises PerflabError if no folder takes them.
    """
    counts = counts or (QUICK if quick else FULL)
    pictures = [(size, index) for size, count in counts.items() for index in range(count)]
    folders = [Path(folder).expanduser()] if folder else [paths.DATA / "images", paths.home() / "images"]
    refusals = []
    for place in sorted(folders, key=lambda place: any(_missing(place, *p) for p in pictures)):  # complete ones first
        try:
            _complete(place, pictures)
            return place
        except OSError as refusal:
            refusals.append(f"{place} ({refusal.strerror or refusal})")
    raise PerflabError(
        f"the course's images cannot be written to {' or to '.join(refusals)}; make room there, name "
        "another folder with PERFLAB_HOME=/path, or use images of your own with PERFLAB_IMAGES=/path"
    )


def _missing(folder: Path, size: str, index: int) -> list[Path]:
    """The files of one picture that are not there: the picture and, of a large one, its small copy."""
    sizes = [size, "256px"] if size == "1080p" else [size]
    files = [folder / name / f"{index:04d}.jpg" for name in sizes]
    return [file for file in files if not os.path.exists(file)]  # False, too, where it may not be read


def _complete(folder: Path, pictures: Sequence[tuple[str, int]]) -> None:
    left = [picture for picture in pictures if _missing(folder, *picture)]
    if not left:
        return
    pool = ThreadPoolExecutor(min(8, cores()))  # numpy and PIL let go of the interpreter where they compute
    with bar("course images", "images", len(left), delay_s=0.3) as progress:
        try:
            for _ in pool.map(_write, itertools.repeat(folder), left):
                progress.update()
        finally:
            pool.shutdown(cancel_futures=True)


def _write(folder: Path, which: tuple[str, int]) -> None:
    size, index = which
    large = jpeg(picture(index, *SIZES[size]))
    for file in _missing(folder, size, index):
        if file.parent.name == size:
            put(file, large)
        else:
            with Image.open(io.BytesIO(large)) as image:
                put(file, jpeg(image.resize(SIZES[file.parent.name], Image.Resampling.LANCZOS)))
