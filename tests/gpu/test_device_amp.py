"""Mixed precision and counted work on a CUDA device: the dtypes that really run, casts, TF32, backward passes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perflab.bench import machine
from perflab.bench.timing import random_input
from perflab.roofline import precision
from perflab.roofline.work import counted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]
BF16, FP16 = torch.bfloat16, torch.float16


def normalised():
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Softmax(-1), nn.Linear(64, 64)]
    return nn.Sequential(*layers).to("cuda"), random_input(32, 64, device="cuda")


def perceptron(device):
    layers = [m for _ in range(4) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    return nn.Sequential(*layers).to(device), random_input(32, 64, device=device)


# -- the audit


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_run_in_16_bits_and_what_sums_or_exponentiates_in_float32(dtype):
    """The lists of torch.amp's CUDA op reference."""
    low = str(dtype).removeprefix("torch.")
    seen = precision.audit(*normalised(), dtype=dtype)
    print(f"\n{seen}")
    assert seen.device == "cuda" and seen.note == ""
    reads = {(r.operator, r.reads) for r in seen.ran if r.operator != "_to_copy"}
    assert reads >= {("addmm", low), ("native_layer_norm", "float32"), ("_softmax", "float32")}
    assert {dtype for name, dtype in reads if name == "gelu"} == {"float32"}


def test_casts_are_those_that_the_lists_ask_for():
    """Input, weight and bias twice, for two linear layers; and the first one's result for layer_norm."""
    seen = precision.audit(*normalised())
    assert seen.casts == 3 + 1 + 3
    assert seen.operators == seen.plain_operators + seen.casts


def test_where_no_operator_is_on_a_list_the_audit_is_that_of_the_processor():
    here, there = (precision.audit(*perceptron(device)) for device in ("cuda", "cpu"))
    fields = ("plain_operators", "operators", "casts", "casts_uncached", "parameter_bytes", "copy_bytes")
    for name in fields:
        assert getattr(here, name) == getattr(there, name), name
    assert here.rows() == there.rows()


def test_the_cache_casts_weights_once_a_region():
    model, x = perceptron("cuda")
    seen = precision.audit(lambda x: [model(x) for _ in range(3)], x)
    assert seen.casts == 16 + 3 and seen.casts_uncached == 3 * 17


def test_after_a_step_under_autocast_all_is_float32():
    model, x = perceptron("cuda")
    low = precision.after_a_step(model, x, dtype=BF16)
    assert low == precision.after_a_step(model, x)
    assert {low[k] for k in ("parameters", "gradients", "states")} == {"float32"}


def test_saved_bytes_agree_with_the_memory_that_a_forward_holds():
    """Large activations, so that the allocator's rounding and the copies of weights are small beside them."""
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
    model, x = nn.Sequential(*layers).to("cuda"), random_input(2**16, 256, device="cuda")
    seen = precision.audit(model, x)
    model(x)
    before = torch.cuda.memory_allocated()
    out = model(x)
    held = torch.cuda.memory_allocated() - before
    print(f"\nheld {held}, counted {seen.saved_bytes}")
    # Saved are the input, which was there before, and all results but the last, which is held as `out`.
    assert seen.saved_bytes[0] == pytest.approx(held - out.nbytes + x.nbytes, rel=0.02)
    assert seen.saved_bytes[1] == pytest.approx(seen.saved_bytes[0] / 2, rel=0.05)


# -- bytes and FLOPs


def test_under_autocast_layer_norm_and_softmax_move_more_bytes_than_in_float32():
    x = random_input(4096, 2048, dtype=BF16, device="cuda")
    for call in (lambda x: F.layer_norm(x, (2048,)), lambda x: F.softmax(x, -1)):
        plain, low = counted(call, x.float()).moved_bytes, counted(call, x).moved_bytes
        with torch.autocast("cuda", BF16):
            cast = counted(call, x).moved_bytes
        print(f"\nfloat32 {plain}, autocast {cast}, bfloat16 {low} bytes for {x.numel()} numbers")
        assert low == pytest.approx(plain / 2, rel=0.01) and cast == pytest.approx(plain * 14 / 8, rel=0.01)


def test_work_counted_on_the_device_is_that_on_the_processor():
    def step(model, x):
        return lambda: model(x).sum().backward()

    here, there = (counted(step(*perceptron(device))) for device in ("cuda", "cpu"))
    print(f"\n{here}\n{there}")
    assert here.operators["aten.addmm"] == there.operators["aten.addmm"]
    assert here.operators["aten.mm"] == there.operators["aten.mm"]
    assert here.flops == there.flops


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_attention_on_the_device_is_counted(dtype):
    q, k, v = (random_input(2, 4, 128, 64, dtype=dtype, device="cuda").requires_grad_() for _ in range(3))
    forward = 2 * (2 * 4 * 128 * 128 * 2) * 64
    once = counted(F.scaled_dot_product_attention, q, k, v)
    both = counted(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    print(f"\n{both.table()}")
    assert once.flops == forward and not once.unknown
    products = sum(o.flops for name, o in both.operators.items() if "attention" in name)
    assert products == forward + forward * 5 // 2 and not both.unknown


def convolutional():
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)), random_input(4, 3, 32, 32, device="cuda")


def encoder():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), random_input(2, 16, 64, device="cuda")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("make", [convolutional, encoder])
def test_a_training_step_has_no_operator_without_a_formula(make, optimizer):
    model, x = make()
    model.to("cuda")
    parameters = optimizer(model.parameters(), lr=0.01)

    def step():
        with torch.autocast("cuda", BF16):
            logits = model(x).flatten(0, -2)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device="cuda"))
        loss.backward()
        parameters.step()
        parameters.zero_grad()

    step()
    work = counted(step)
    print(f"\n{work}\n{work.table().to_string()}")
    assert not work.unknown and work.flops > 0


# -- TF32


def test_tf32_changes_a_product_inside_and_not_after():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 needs capability 8.0")
    a, b = (random_input(512, 512, device="cuda", seed=s) for s in (0, 1))
    exact = a.double() @ b.double()

    def error():
        return ((a @ b).double() - exact).abs().max().item()

    before = error()
    with precision.matmul_precision("high"):
        inside = error()
    print(f"\nlargest error: float32 {before:.2g}, TF32 {inside:.2g}")
    assert inside > 20 * before and error() == before


def trained(width, batch, region=None):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to("cuda")
    x = random_input(batch, width, device="cuda")

    def step():
        with torch.autocast("cuda", BF16, enabled=region == "autocast"):
            loss = model(x).mean()
        loss.backward()

    return step


@pytest.mark.parametrize(
    ("step", "much"),
    [((4096, 4096), True), ((4096, 4096, "autocast"), False), ((64, 8), False)],
    ids=["large float32", "16-bit", "tiny"],
)
def test_most_of_a_busy_step_goes_to_float32_products_only_where_they_are_large(step, much):
    products, busy = precision.float32_products(trained(*step))
    print(f"\nproducts {products:.3f}, busy {busy:.3f}")
    assert 0 <= products <= 1 and 0 < busy <= 1.2
    assert (min(products, busy) > 0.5) is much
