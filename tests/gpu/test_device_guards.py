"""The guards where there is a GPU: samples on the device are named, and a GPU in use here disturbs no right loader."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from perflab.bench import machine
from perflab.loading.guards import guards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]


class OnDevice(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((2,), float(i), device="cuda")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_samples_on_the_gpu_are_named(method):
    found = guards(DataLoader(OnDevice(), 8, num_workers=2, multiprocessing_context=method))
    assert {alarm.about for alarm in found.alarms} == {"device"}, str(found)


def test_a_gpu_in_use_here_disturbs_no_right_loader():
    torch.ones(4, device="cuda").sum().item()
    right = TensorDataset(torch.randn(500, 8), torch.arange(500))
    found = guards(DataLoader(right, 20, num_workers=2, multiprocessing_context="fork", pin_memory=True))
    assert found.clear, str(found)
    assert torch.ones(4, device="cuda").sum().item() == 4
