"""Images: those that are made, those that a learner has, and the dataset over them."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from perflab import paths
from perflab.errors import PerflabError
from perflab.loading import images as choosing
from perflab.loading import synthetic as module
from perflab.loading.images import StagedPhotos, images
from perflab.loading.synthetic import make

COUNTS = {"1080p": 2, "500x375": 3}
NAMES = ["1080p/0000.jpg", "1080p/0001.jpg", "256px/0000.jpg", "256px/0001.jpg"]
NAMES += [f"500x375/000{index}.jpg" for index in range(3)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("PERFLAB_PROGRESS", "off")
    monkeypatch.delenv("PERFLAB_IMAGES", raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(folder=tmp_path_factory.mktemp("made"), counts=COUNTS)


@pytest.fixture
def copy(made, tmp_path):
    for path in made.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


@pytest.fixture
def own(made, tmp_path, monkeypatch):
    """A learner's folder: two good images, and four files that are to be left out."""
    folder = tmp_path / "own"
    (folder / "trip").mkdir(parents=True)
    photo = (made / "500x375/0000.jpg").read_bytes()
    (folder / "trip/photo.jpg").write_bytes(photo)
    Image.new("L", (40, 30), 90).save(folder / "drawing.png")
    (folder / "cut.jpg").write_bytes(photo[: len(photo) * 3 // 4])
    (folder / "letter.jpg").write_text("not a picture")
    (folder / "nothing.jpg").touch()
    (folder / ".hidden.jpg").write_bytes(photo)
    monkeypatch.setenv("PERFLAB_IMAGES", str(folder))
    return folder


def jpegs(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_index_and_size_decide_every_byte(made, tmp_path):
    assert jpegs(make(folder=tmp_path, counts=COUNTS)) == jpegs(made)
    assert len(set(jpegs(made).values())) == len(NAMES)


def test_every_promised_file_has_its_size_in_pixels(made):
    assert sorted(jpegs(made)) == NAMES
    for name in NAMES:
        with Image.open(made / name) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert image.size == module.SIZES[name.split("/")[0]]


def test_a_1080p_file_is_as_large_as_a_photograph(made):
    for name in NAMES[:2]:
        assert 400e3 < (made / name).stat().st_size < 1e6


def test_the_small_copy_shows_the_large_image(made):
    with Image.open(made / "1080p/0001.jpg") as large, Image.open(made / "256px/0001.jpg") as small:
        shrunk = np.asarray(large.resize(small.size, Image.Resampling.BOX), dtype=float)
        assert np.abs(shrunk - np.asarray(small, dtype=float)).mean() < 6


def test_the_texture_has_the_spectrum_of_photographs():
    field = module.fractal(np.random.default_rng(0), 512, 512).astype(float)
    amplitude = np.abs(np.fft.rfft2(field))
    frequency = np.hypot(np.fft.rfftfreq(512), np.fft.fftfreq(512)[:, None])
    band = (frequency > 0.01) & (frequency < 0.4)
    slope = np.polyfit(np.log(frequency[band]), np.log(amplitude[band]), 1)[0]
    assert abs(slope + 1) < 0.02, slope


def test_a_complete_set_is_left_alone(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert make(folder=copy, counts=COUNTS) == copy
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_only_missing_files_are_made_and_a_larger_set_keeps_the_smaller_one(copy, made):
    (copy / "256px/0001.jpg").unlink()
    before = {name: (copy / name).stat().st_ino for name in NAMES if (copy / name).exists()}
    make(folder=copy, counts=COUNTS | {"500x375": 4})
    assert {name: (copy / name).stat().st_ino for name in before} == before
    assert {name: content for name, content in jpegs(copy).items() if name in NAMES} == jpegs(made)
    assert len(jpegs(copy)) == len(NAMES) + 1


def start(folder):
    code = "import sys; from perflab.loading.synthetic import make; make(folder=sys.argv[1], counts={'1080p': 8})"
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=paths.COURSE, stderr=subprocess.PIPE)


def first_file(folder):
    deadline = time.monotonic() + 60
    while not list(folder.rglob("*.jpg")):
        assert time.monotonic() < deadline, "no file was made within a minute"
        time.sleep(0.02)


def test_an_interrupt_leaves_no_half_file(tmp_path):
    process = start(tmp_path)
    first_file(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert errors.count(b"Traceback") == 1, errors.decode()
    assert not list(tmp_path.rglob("*.part"))
    assert 0 < len(jpegs(tmp_path)) < 16
    for path in tmp_path.rglob("*.jpg"):
        assert not choosing._fault(path)


def test_two_processes_that_make_the_same_set_both_end_well(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert len(jpegs(tmp_path)) == 16 and not list(tmp_path.rglob("*.part"))


def test_a_write_that_stops_half_way_is_a_sentence_and_leaves_no_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(PerflabError, match=r"PERFLAB_HOME=/path.*PERFLAB_IMAGES=/path"):
            make(folder=tmp_path, counts={"1080p": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_learners_folder_serves_where_the_course_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(paths, "DATA", tmp_path / "file")
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "home"))
    assert make(counts={"500x375": 1}) == tmp_path / "home/images"
    monkeypatch.setenv("PERFLAB_HOME", str(tmp_path / "file"))
    with pytest.raises(PerflabError, match="cannot be written to"):
        make(counts={"500x375": 1})


def test_images_are_made_when_they_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setattr(module, "QUICK", COUNTS)
    found = images()
    assert [path.name for path in found.paths] == ["0000.jpg", "0001.jpg", "0002.jpg"]
    assert repr(found) == "3 images, synthetic 500x375"
    assert len(images("256px", limit=1)) == 1


@pytest.mark.parametrize(("size", "limit"), [("4k", None), ("1080p", 0)])
def test_an_unknown_size_or_an_empty_choice_is_refused(size, limit):
    with pytest.raises(PerflabError, match=r"choose one of|give 1 or more"):
        images(size, limit)


def test_files_that_cannot_be_read_are_named_without_a_path_and_left_out(own):
    found = images()
    assert [path.relative_to(own).as_posix() for path in found.paths] == ["drawing.png", "trip/photo.jpg"]
    reasons = dict(found.skipped)
    assert list(reasons) == ["cut.jpg", "letter.jpg", "nothing.jpg"]
    assert "truncated" in reasons["cut.jpg"] and reasons["letter.jpg"] == "not an image"
    assert repr(found).startswith("2 images, your folder; left out: cut.jpg: ")
    assert str(own.parent) not in repr(found)
    assert [path.name for path in images(limit=1).paths] == ["drawing.png"]


def test_a_folder_is_checked_once_and_again_when_it_changed(own):
    first = images()
    assert images() is first
    Image.new("RGB", (30, 30)).save(own / "added.png")
    assert len(images()) == len(first) + 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "holds no file"),
        ("text", "holds no readable image .notes.txt: not an image"),
        ("missing", "No such file"),
        ("file", "Not a directory"),
        ("closed", "Permission denied"),
    ],
)
def test_a_folder_that_gives_no_image_is_one_sentence_with_the_way_out(tmp_path, monkeypatch, kind, reason):
    folder = tmp_path / kind
    if kind == "file":
        folder.touch()
    elif kind != "missing":
        folder.mkdir(mode=0 if kind == "closed" else 0o755)
    if kind == "text":
        (folder / "notes.txt").write_text("milk")
    monkeypatch.setenv("PERFLAB_IMAGES", str(folder))
    user = os.geteuid()
    if kind == "closed" and user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(PerflabError, match=f"{reason}.*unset PERFLAB_IMAGES") as caught:
            images()
    finally:
        os.seteuid(user)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", ["1080p", "500x375", "256px"])
def test_an_item_is_a_square_of_bytes_and_a_label_below_ten(made, size):
    paths = sorted((made / size).glob("*.jpg"))
    photos = StagedPhotos(paths=[*paths, *paths * 6], side=64)
    pixels, label = photos[11]
    assert (pixels.dtype, tuple(pixels.shape), label) == (torch.uint8, (3, 64, 64), 1)
    assert pixels.is_contiguous() and len(photos) == 7 * len(paths)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    Image.new(mode, (20, 50)).save(path)
    assert StagedPhotos(paths=[path], side=16)[0][0].shape == (3, 16, 16)


def test_the_centre_is_kept(tmp_path):
    image = Image.new("RGB", (90, 30), "red")
    image.paste("blue", (30, 0, 60, 30))
    image.save(tmp_path / "stripes.png")
    pixels, _ = StagedPhotos(paths=[tmp_path / "stripes.png"], side=10)[0]
    red, _, blue = pixels[..., 2:-2]  # the outermost columns blend with the neighbouring stripe
    assert red.max() == 0
    assert blue.min() == 255


def test_an_image_lost_meanwhile_is_named(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "lost.png")
    photos = StagedPhotos(paths=[tmp_path / "lost.png"])
    (tmp_path / "lost.png").unlink()
    with pytest.raises(PerflabError, match=r"lost\.png cannot be read any more"):
        photos[0]


def test_no_paths_and_no_pixels_are_refused(made):
    with pytest.raises(PerflabError, match="paths is empty"):
        StagedPhotos(paths=[])
    with pytest.raises(PerflabError, match="side=0"):
        StagedPhotos(paths=[made / "256px/0000.jpg"], side=0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_workers_deliver_what_one_process_reads(made, method):
    photos = StagedPhotos(paths=sorted((made / "500x375").glob("*.jpg")), side=32)
    assert len(pickle.dumps(photos)) < 2000
    alone = torch.stack([photos[index][0] for index in range(3)])
    loader = torch.utils.data.DataLoader(photos, 2, num_workers=2, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(torch.cat([pixels for pixels, _ in batches]), alone)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 1, 2]


def test_a_worker_needs_nothing_that_draws():
    code = "import sys, perflab.loading.images; print({'matplotlib', 'pandas', 'ipywidgets'} & {*sys.modules})"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=paths.COURSE, text=True)
    assert printed.strip() == "set()"
