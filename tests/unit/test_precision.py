"""The audit of mixed precision against what autocast documents, and what 16 bits can hold."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.profiler_util import Interval

from perflab import PerflabError
from perflab.roofline import precision

BF16, FP16 = torch.bfloat16, torch.float16
KERNELS = {"gemm": (0, 50), "norm": (70, 120)}  # us


def mlp(blocks=4, width=64, device="cpu"):
    layers = [m for _ in range(blocks) for m in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    return nn.Sequential(*layers).to(device), torch.randn(32, width, device=device)


# -- casts


def test_each_float32_tensor_that_a_linear_layer_gets_is_cast_once(each_device):
    """8 weights, 8 biases, and the input of the first; the activations after it are 16-bit."""
    seen = precision.audit(*mlp(device=each_device))
    assert seen.casts == 8 + 8 + 1
    assert seen.plain_operators == 12 and seen.operators == 12 + 17
    assert seen.casts_share == pytest.approx(17 / 29)
    assert precision.audit(nn.GELU(), torch.randn(8, device=each_device)).casts == 0


def test_the_cache_casts_weights_once_a_region_and_activations_each_time(each_device):
    model, x = mlp(device=each_device)
    seen = precision.audit(lambda x: [model(x) for _ in range(3)], x)
    assert seen.casts == 16 + 3 and seen.casts_uncached == 3 * 17


def reads(seen):
    return {ran.operator: ran.reads for ran in seen.ran if ran.operator != "_to_copy"}


def test_products_run_in_the_low_dtype_and_a_loss_in_float32():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    seen = precision.audit(lambda x: nn.functional.mse_loss(model(x), x), x)
    assert reads(seen) == {"addmm": "bfloat16", "mse_loss": "float32"}
    assert reads(precision.audit(model, x, dtype=FP16)) == {"addmm": "float16"}


def test_the_audit_agrees_with_the_dtype_of_the_result():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Softmax(-1)), torch.randn(4, 16)
    seen = precision.audit(model, x)
    with torch.autocast("cpu", BF16):
        out = model(x)
    assert reads(seen)["_softmax"] == str(out.dtype).removeprefix("torch.")
    assert "CPU" in seen.note and "nothing of CUDA" in str(seen)


def test_rows_are_an_operator_each_with_its_dtypes(each_device):
    assert precision.audit(*mlp(1, device=each_device)).rows() == {
        "addmm": {"reads": "bfloat16", "writes": "bfloat16", "calls": 2},
        "gelu": {"reads": "bfloat16", "writes": "bfloat16", "calls": 1},
        "_to_copy": {"reads": "float32", "writes": "bfloat16", "calls": 5},
    }


# -- what stays


def test_parameters_stay_float32_and_a_16_bit_copy_comes_on_top(each_device):
    model, x = mlp(device=each_device)
    seen = precision.audit(model, x)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert seen.parameter_bytes == (nbytes, nbytes)
    assert seen.copy_bytes == nbytes // 2


def test_a_copy_of_a_frozen_weight_is_not_kept():
    """autocast caches a leaf that wants a gradient, and nothing else."""
    model, x = mlp()
    seen = precision.audit(model.requires_grad_(False), x)
    assert seen.copy_bytes == 0 and seen.casts == 17


def test_saved_bytes_are_the_activations_and_under_autocast_half_plus_the_copies():
    """A linear layer saves its input and its weight; the weight in float32 is the parameter itself."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    plain, low = precision.audit(model, x).saved_bytes
    activations, weights = 2 * 32 * 64, 64 * 64
    assert plain == 4 * activations
    assert low == 2 * activations + 2 * weights  # of the second layer: the first one's input needs no gradient


def test_after_a_step_all_is_float32_under_autocast_and_16_bit_after_to(each_device):
    model, x = mlp(device=each_device)
    n = sum(p.numel() for p in model.parameters())
    plain, low = precision.after_a_step(model, x), precision.after_a_step(model, x, dtype=BF16)
    assert plain == low
    assert [low[k] for k in ("parameters", "gradients", "states")] == ["float32"] * 3
    assert [low[f"{k}_bytes"] for k in ("parameter", "gradient", "state")] == [4 * n, 4 * n, 8 * n]
    pure = precision.after_a_step(model.to(BF16), x.to(BF16))
    assert [pure[f"{k}_bytes"] for k in ("parameter", "gradient", "state")] == [2 * n, 2 * n, 4 * n]
    assert all(p.grad is None for p in model.parameters())  # a copy was trained


def test_an_audit_leaves_the_model_as_it_was():
    model, x = mlp()
    before = [p.clone() for p in model.parameters()]
    precision.audit(model, x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: precision.audit(*mlp(), dtype=torch.float64), "bfloat16 or float16"),
        (lambda: precision.audit(mlp()[0].to(BF16), torch.randn(1, 64)), "16-bit already"),
        (lambda: precision.audit(lambda: None), "no operator"),
        (lambda: precision.audit(*mlp(), device="gpu"), "on gpu: it knows cpu and cuda"),
        (lambda: torch.autocast("cpu", BF16)(precision.audit)(*mlp()), "outside of torch.autocast"),
    ],
)
def test_a_wrong_call_is_one_sentence(call, word):
    with pytest.raises(PerflabError, match=word):
        call()


# -- TF32


def test_tf32_is_set_inside_and_as_before_outside():
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), precision.matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_no_share_of_products_is_above_one_and_without_kernels_there_is_none():
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    product = SimpleNamespace(name=precision.Named.name, device_type=cpu, device_time_total=60.0)
    kernels = [SimpleNamespace(name=k, device_type=cuda, time_range=Interval(*at)) for k, at in KERNELS.items()]
    annotation = SimpleNamespace(device_type=cuda, is_user_annotation=True, time_range=Interval(0, 1000))
    annotation.name = precision.Named.name
    assert precision.shares([product, annotation, *kernels], 200e-6) == pytest.approx((0.6, 0.5))  # 100 us busy
    assert precision.shares([product, kernels[0]], 200e-6)[0] == 1.0  # two kernels that overlap by 10 us
    assert all(math.isnan(x) for x in precision.shares([product, annotation], 200e-6))


@pytest.mark.parametrize(("region", "named"), [(False, 5), (True, 0)])
def test_the_profiler_sees_each_float32_product_by_name(region, named):
    """Two layers: two forward, two of the weights, one of the second one's input."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, precision.Named():
        with torch.autocast("cpu", BF16, enabled=region):
            loss = model(x).sum()
        loss.backward()
    assert sum(e.name == precision.Named.name for e in seen.events()) == named
