"""Other ways to the same pixels, against the full decode and against formulas."""

import io
import math

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from perflab import PerflabError
from perflab.bench import machine
from perflab.loading.decode import Arrays, JpegBytes, StagedDraft, VisionPhotos, as_list, decode_on_gpu, psnr, stored
from perflab.loading.demand import explore_workers
from perflab.loading.images import StagedPhotos


def test_psnr_is_its_formula():
    black = torch.zeros(3, 8, 8, dtype=torch.uint8)
    assert psnr(black + 1, black) == pytest.approx(20 * math.log10(255))  # 48.13 dB: every pixel off by one
    assert psnr(black + 255, black) == pytest.approx(0)
    assert psnr(black, black) == math.inf


def cpu_s(dataset):
    began = psutil.Process().cpu_times().user
    for _ in range(3):
        for i in range(len(dataset)):
            dataset[i]
    return psutil.Process().cpu_times().user - began


def test_a_draft_of_a_large_image_is_alike_and_cheaper():
    full, draft = StagedPhotos("1080p", limit=4), StagedDraft("1080p", limit=4)
    assert min(psnr(draft[i][0], full[i][0]) for i in range(4)) > 38
    assert cpu_s(full) > 1.5 * cpu_s(draft)


@pytest.mark.parametrize("side", [20, 60, 112, 224, 300, 375])
def test_a_draft_never_goes_below_the_size_asked_for(side):
    draft = StagedDraft("500x375", side, limit=1)
    assert min(draft.decode(draft.read(0)).size) >= side
    assert draft[0][0].shape == (3, side, side)


def test_a_draft_of_what_is_no_jpeg_is_the_image_itself(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert torch.equal(
        StagedDraft(side=20, paths=[tmp_path / "x.png"])[0][0], StagedPhotos(side=20, paths=[tmp_path / "x.png"])[0][0]
    )


def test_stored_pixels_are_those_of_the_dataset_in_workers_too():
    photos = StagedPhotos("500x375", side=32, limit=6)
    with stored(photos) as pixels:
        loader = DataLoader(pixels, 2, num_workers=2, multiprocessing_context="spawn")
        got = torch.cat([images for images, _ in loader])
        assert torch.equal(got, torch.stack([photos[i][0] for i in range(6)]))
        file = pixels.file
    with pytest.raises(FileNotFoundError):
        Arrays(file)


def test_the_bytes_are_those_of_the_file():
    data = JpegBytes("500x375", limit=2)
    files, labels = as_list([data[0], data[1]])
    assert [bytes(f.numpy()) for f in files] == [data.read(0), data.read(1)] and labels.tolist() == [0, 1]
    assert Image.open(io.BytesIO(bytes(files[0].numpy()))).size == (500, 375)


@pytest.mark.skipif(bool(machine.missing("torchvision")), reason="torchvision is not installed")
def test_torchvision_decodes_the_same_picture():
    full, vision = StagedPhotos("1080p", limit=2), VisionPhotos("1080p", limit=2)
    assert min(psnr(vision[i][0], full[i][0]) for i in range(2)) > 30


@pytest.mark.parametrize(
    ("need", "call", "said"),
    [
        ("torchvision", lambda: VisionPhotos("1080p", limit=1), "not installed here: pip install torchvision"),
        ("cuda", lambda: decode_on_gpu([], 224), "decoding on the GPU: no CUDA device here"),
    ],
)
def test_what_a_decoder_misses_is_one_sentence(need, call, said):
    if not machine.missing(need):
        pytest.skip(f"this machine has {need}")
    with pytest.raises(PerflabError, match=said):
        call()


def test_the_worker_explorer_draws_what_was_measured():
    from perflab import vary

    sweep = vary("workers per core", [0.5, 1], lambda share: None, study="t.sweep", per="image", work=8, budget_s=0.1)
    explorer = explore_workers(reading=sweep)
    for wanted in (10, 100_000):
        explorer.controls["wanted"].value = wanted
        assert explorer.error is None
    assert "None of these feeds" in explorer.caption.value or "feed" in explorer.caption.value
    assert repr(explorer).startswith("Explorer(regime='reading' of ['reading'], wanted=300")
