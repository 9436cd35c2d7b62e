"""JPEG files with the statistics of photographs, made here: seeded, checked, taken up where they were left."""

import contextlib
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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
SCHEMA = 1  # of the manifest and the pictures: a new number makes every file again

Job = tuple[Path, str, int, tuple[str, ...]]


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


def make(
    quick: bool = True,
    folder: str | Path | None = None,
    counts: Mapping[str, int] | None = None,
) -> Path:
    """Make the course's images, or what is missing or damaged of them, and return their folder.

    `<folder>/1080p/0000.jpg` and so on, `500x375/` likewise, and in `256px/` a copy of each 1080p image
    with a short side of 256 pixels. `counts` replaces the numbers of the quick or the full set; the quick
    set is the beginning of the full one. Without `folder` they lie in the course's data folder or, where
    that takes no file, in the learner's own. Raises PerflabError if no folder takes them. Where processes
    are spawned (macOS), a script calls this below `if __name__ == "__main__"`.
    """
    counts = counts or (QUICK if quick else FULL)
    wanted = [f"{size}/{index:04d}.jpg" for size, count in counts.items() for index in range(count)]
    wanted += [f"256px/{index:04d}.jpg" for index in range(counts.get("1080p", 0))]
    folders = (Path(folder).expanduser(),) if folder else folders_of_the_course()
    for place in folders:
        if len(_sound(place, wanted)) == len(wanted):
            return place
    refusals = []
    for place in folders:
        try:
            _complete(place, wanted)
            return place
        except OSError as refusal:
            refusals.append(f"{place} ({refusal.strerror or refusal})")
    raise PerflabError(
        f"the course's images cannot be written to {' or to '.join(refusals)}; make room there, name "
        "another folder with PERFLAB_HOME=/path, or use images of your own with PERFLAB_IMAGES=/path"
    )


def folders_of_the_course() -> tuple[Path, ...]:
    return paths.DATA / "images", paths.home() / "images"


def manifest(folder: Path) -> dict[str, dict]:
    """What has been made: name -> sha256, bytes, width, height. Empty if unreadable or of another schema."""
    try:
        kept = json.loads((folder / "manifest.json").read_bytes())
        return dict(kept["files"]) if kept["schema"] == SCHEMA else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _sound(folder: Path, names: Sequence[str]) -> set[str]:
    """Those of the names whose file is the one in the manifest, byte for byte."""
    known = manifest(folder)
    sound = set()
    for name in names:
        with contextlib.suppress(OSError, KeyError, TypeError):
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() == known[name]["sha256"]:
                sound.add(name)
    return sound


def _complete(folder: Path, wanted: Sequence[str]) -> None:
    for size in SIZES:
        (folder / size).mkdir(parents=True, exist_ok=True)
    with bar("course images", "images", len(wanted), delay_s=0.3) as shown, _alone(folder) as alone:
        for stale in folder.rglob(".*.part") if alone else ():
            stale.unlink(missing_ok=True)
        known, sound = manifest(folder), _sound(folder, wanted)
        shown.update(len(sound))
        jobs = _jobs(folder, [name for name in wanted if name not in sound])
        with contextlib.closing(_results(jobs)) as results:
            for made in results:
                known |= made
                _save(folder, known)
                shown.update(len(made))


def _jobs(folder: Path, missing: Sequence[str]) -> list[Job]:
    """One job makes one picture and writes those of its files that are missing."""
    pictures: dict[tuple[str, int], list[str]] = {}
    for name in missing:
        size, file = name.split("/")
        pictures.setdefault(("1080p" if size == "256px" else size, int(file[:4])), []).append(name)
    return [(folder, size, index, tuple(names)) for (size, index), names in pictures.items()]


def _results(jobs: Sequence[Job]) -> Iterator[dict[str, dict]]:
    """Do the jobs in worker processes, yield what each made; closing it leaves no process behind."""
    if not jobs:
        return
    # A forked worker starts at once and needs no guarded __main__; ours runs numpy and PIL on one thread.
    method = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(min(cores(), len(jobs)), method, initializer=_follow_parent)
    left = list(jobs)
    try:
        pending = {pool.submit(_write, *job): job for job in jobs}
        for done in as_completed(pending):
            made = done.result()
            left.remove(pending[done])
            yield made
    except BrokenProcessPool:  # a worker was killed, mostly for memory: one process needs the least
        yield from (_write(*job) for job in left)
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """An interrupt is the parent's to handle: it lets each worker end its file. A worker dies with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write(folder: Path, size: str, index: int, names: Sequence[str]) -> dict[str, dict]:
    whole = jpeg(picture(index, *SIZES[size]))
    made = {}
    for name in names:
        content, (width, height) = whole, SIZES[name.split("/")[0]]
        if (width, height) != SIZES[size]:
            with Image.open(io.BytesIO(whole)) as image:
                content = jpeg(image.resize((width, height), Image.Resampling.LANCZOS))
        put(folder / name, content)
        digest = hashlib.sha256(content).hexdigest()
        made[name] = {"sha256": digest, "bytes": len(content), "width": width, "height": height}
    return made


def _save(folder: Path, files: Mapping[str, dict]) -> None:
    kept = {"schema": SCHEMA, "files": dict(sorted(files.items()))}
    put(folder / "manifest.json", json.dumps(kept).encode())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait until no other process makes images there; False where the file system knows no locks."""
    with open(folder / ".lock", "ab") as lock:
        alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        yield alone
