"""Loading on a CUDA device: decoding there, pinning, and what must not come from a worker."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from perflab import guards
from perflab.bench import machine
from perflab.loading.decode import JpegBytes, ahead, as_list, decode_on_gpu, psnr
from perflab.loading.images import StagedPhotos
from perflab.loading.stages import stage_map, trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(machine.missing("cuda")), reason="no CUDA device"),
]
vision = pytest.mark.skipif(bool(machine.missing("torchvision")), reason="torchvision is not installed")


@vision
def test_the_gpu_decodes_the_same_picture():
    data, full = JpegBytes("1080p", limit=4), StagedPhotos("1080p", limit=4)
    got = decode_on_gpu(as_list([data[i] for i in range(4)])[0], 224)
    assert got.is_cuda and got.dtype == torch.uint8 and got.shape == (4, 3, 224, 224)
    assert min(psnr(got[i], full[i][0]) for i in range(4)) > 30


@vision
def test_files_of_different_sizes_make_one_batch():
    large, small = JpegBytes("1080p", limit=1), JpegBytes("500x375", limit=1)
    got = decode_on_gpu([large[0][0], small[0][0]], 96)
    assert got.shape == (2, 3, 96, 96)
    assert psnr(got[1], StagedPhotos("500x375", 96, limit=1)[0][0]) > 25


@vision
def test_reading_ahead_changes_nothing():
    data = JpegBytes("500x375", limit=6)
    loader = DataLoader(data, 2, collate_fn=as_list)
    plain = torch.cat([decode_on_gpu(files, 64) for files, _ in loader])
    assert torch.equal(torch.cat([decode_on_gpu(files, 64) for files, _ in ahead(loader)]), plain)


@pytest.mark.parametrize(("workers", "thread"), [(0, "main thread"), (2, "pinning thread")])
def test_a_thread_pins_where_there_are_workers(workers, thread):
    how = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(StagedPhotos("500x375", 64, limit=8), 4, num_workers=workers, pin_memory=True, **how)
    pinned = []
    rows = stage_map(trace(loader, ["decode"], to=lambda batch: pinned.append(batch[0].is_pinned())))
    assert rows["pin"]["runs in"] == f"main process, {thread}" and rows["pin"]["calls"] == 2
    assert pinned == [True, True]


class OnDevice(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((4,), float(i), device="cuda")


def test_a_dataset_that_returns_cuda_tensors_is_named_and_nothing_hangs():
    found = guards(DataLoader(OnDevice(), 2, num_workers=2, multiprocessing_context="fork"))
    assert "device" in {a.about for a in found.alarms}
    assert "cpu" in found["device"].way_out.lower()


def test_guards_work_after_cuda_was_used():
    torch.zeros(1, device="cuda")
    found = guards(DataLoader(StagedPhotos("500x375", 64, limit=16), 4, num_workers=2, multiprocessing_context="fork"))
    assert found.clear and found["same samples"].state == "fine"
