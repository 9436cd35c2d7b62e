"""The roofline on a CUDA device: roofs beside plain timings and the datasheet, regimes, mixed precision, TF32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perflab import observe, question, vary
from perflab.bench import machine, timing
from perflab.bench.timing import random_input
from perflab.roofline import checks, gpus, peaks, precision
from perflab.roofline.operators import OPERATORS, SIZES, grid
from perflab.roofline.work import counted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]
BF16, FP16 = torch.bfloat16, torch.float16


def printed() -> gpus.Gpu:
    card = gpus.find(torch.cuda.get_device_name())
    return card or pytest.skip(f"{torch.cuda.get_device_name()} is not in data/gpus.toml")


def skip_without(dtype: str):
    if why := peaks.missing(dtype):
        pytest.skip(why)


# -- roofs


def test_the_bf16_roof_is_a_plain_product_and_the_copy_roof_a_plain_copy():
    """Interleaved in one run: within 3 %; and the product reaches 60 to 95 % of what is printed."""
    skip_without("bf16")
    n, nbytes = peaks.side("bf16"), peaks.copy_bytes()

    def plain_product():
        a, b = (random_input(n, n, dtype=BF16, device="cuda", seed=7 + k) for k in range(2))
        return lambda: a @ b

    def plain_copy():
        x = random_input(nbytes // 4, device="cuda", seed=7)
        out = torch.empty_like(x)
        return lambda: out.copy_(x)

    kinds = {"plain product": plain_product, "plain copy": plain_copy}
    kinds |= {"bf16": lambda: peaks.multiplying("bf16", n), "copy": lambda: peaks.copying(nbytes)}
    how = {"prepare": lambda make: make(), "study": "t.plain", "clock": "device", "budget_s": 8}
    seen = vary("call", kinds, lambda call: call(), **how)
    assert not seen.reasons, seen.reasons
    product, copy = seen.ratio("bf16", "plain product"), seen.ratio("copy", "plain copy")
    flops_per_s = 2 * n**3 / seen["time_s"].of("bf16").mid
    bytes_per_s = 2 * nbytes / seen["time_s"].of("copy").mid
    print(f"\nproduct {product}, copy {copy}; {flops_per_s / 1e12:.1f} TFLOP/s, {bytes_per_s / 1e12:.3f} TB/s")
    assert 0.97 < product.mid < 1.03 and 0.97 < copy.mid < 1.03
    card = printed()
    assert 0.6 < flops_per_s / card.peaks["bf16"] < 0.95
    assert 0.6 < bytes_per_s / card.bytes_per_s < 1


def test_every_format_that_the_device_offers_has_a_roof_below_the_printed_one():
    seen = peaks.measure(study="t.roofs", budget_s=8)
    here = peaks.of(seen, observe("t.device", peaks.device, timed=["cache_bytes"]))
    print(f"\n{seen}\n{here}")
    offered = {kind for kind in peaks.KINDS[1:] if not peaks.missing(kind)}
    assert set(here.peaks) == offered, seen.reasons
    assert here.cache_bytes and here.cache_bytes > 2**20
    if torch.cuda.get_device_capability() >= (8, 0):
        assert here.peaks["fp32"] < here.peaks["tf32"] < here.peaks["bf16"]
    card = printed()
    for kind in offered & set(card.peaks):
        assert 0.5 < here.peaks[kind] / card.peaks[kind] < 1.05, kind  # a boost above the printed clock is possible


def relative_error(got, a, b) -> float:
    exact = a.double() @ b.double()
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("before", ["highest", "high"])
def test_fp32_products_are_not_tf32_ones_and_the_setting_is_left_as_it_was(before, monkeypatch):
    skip_without("tf32")
    a, b = (random_input(512, 512, device="cuda", seed=s) for s in (0, 1))
    outs, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, out: outs.append(product(*args, out=out)))
    with precision.matmul_precision(before):
        for dtype in ("fp32", "tf32"):
            peaks.multiplying(dtype, 512)()
        assert torch.get_float32_matmul_precision() == before
    fp32, tf32 = (relative_error(out, a, b) for out in outs)
    print(f"\nrelative errors: fp32 {fp32:.2g}, tf32 {tf32:.2g}")
    assert fp32 < 1e-5 < 1e-4 < tf32


def test_the_fp8_product_is_the_product_of_the_rounded_matrices():
    skip_without("fp8")
    a, b = (random_input(256, 256, device="cuda", seed=s).to(torch.float8_e4m3fn).float() for s in (0, 1))
    got = peaks.multiplying("fp8", 256)()
    assert got.dtype is BF16 and relative_error(got, a, b.t()) < 0.01


def test_a_copy_out_of_the_cache_is_timed_without_its_launch():
    """16 MiB twice fit the L2 of large cards; queued ahead, they are not limited by how fast the host starts them."""
    x, small = random_input(2**22, device="cuda"), random_input(256, device="cuda")
    out, to = torch.empty_like(x), torch.empty_like(small)
    queued = min(peaks.in_a_row(lambda: out.copy_(x), 16) for _ in range(5))
    tiny = min(peaks.in_a_row(lambda: to.copy_(small), 50) for _ in range(5))
    launched = min(timing.wall(lambda: to.copy_(small), 50, 5)[0])
    print(f"\n16 MiB: {2 * x.nbytes / queued:.3g} bytes/s; 1 KiB: {tiny:.2g} s queued, {launched:.2g} s launched")
    assert tiny < launched and 2 * x.nbytes / queued > 1e11


# -- regimes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name, value in {"HOME": home, "SEATS": home / "seats", "PROGRESS": "off"}.items():
            patch.setenv(f"PERFLAB_{name}", str(value))
        here, tensors = peaks.of(peaks.measure(study="t.roofs", budget_s=5)), {}
        how = {"prepare": lambda call: call.ready(tensors), "study": "t.ops", "budget_s": 12}
        seen = vary("operator", grid(), lambda call: call(), **how)
        assert not seen.reasons, seen.reasons
        rows = checks.checks(seen, checks.raised(here, seen))
        for c in rows:
            print(
                f"{c.label:18} {c.placed.regime:10} at least {c.placed.bound_s:.3g} s, {c.time_s:.3g} s; "
                f"twice the rows x {c.twice:.2f} {c.size_agrees}, half the bytes x {c.half:.2f} {c.bytes_agree}"
            )
        return {c.label: c for c in rows}


def test_all_three_regimes_are_there(found):
    assert {c.placed.regime for c in found.values()} == {"arithmetic", "bandwidth", "overhead"}
    large = {name: found[f"{name} large"].placed.regime for name in OPERATORS}
    assert large == dict.fromkeys(OPERATORS, "bandwidth") | {"matmul": "arithmetic"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_twice_the_rows_or_half_the_bytes_do_to_the_time_what_the_regime_says(found, name, size):
    """A tiny product may fail the first: the library picks other kernels, or two of them, for another shape."""
    c = found[f"{name} {size}"]
    assert c.size_agrees or (name, size) == ("matmul", "small"), (c.placed.regime, c.twice)
    assert c.size_agrees or c.bytes_agree, (c.placed.regime, c.twice, c.half)


@pytest.mark.parametrize(
    "label", ["add large", "gelu large", "matmul medium", "matmul large", "add small", "gelu small"]
)
def test_half_the_bytes_do_to_the_time_what_the_regime_says(found, label):
    """Not asked of layer_norm and softmax: a kernel may run below its roof, which is what the table shows then."""
    assert found[label].bytes_agree, (found[label].placed.regime, found[label].half)


def test_nothing_large_beats_its_bound(found):
    for name in OPERATORS:
        c = found[f"{name} large"]
        assert c.time_s > 0.93 * c.placed.bound_s, c.label


def test_the_reference_answer_is_correct_and_a_wrong_one_hears_which():
    q = question("05.1")
    right = eval(q.problem.solution)
    outcome, wrong = q.check(right), q.check(right | {"d": "arithmetic"})
    print(f"\n{outcome}\n{wrong}")
    assert outcome.state == "Correct"
    assert wrong.state == "Not right" and wrong.sentence.startswith("d is not arithmetic")


# -- mixed precision


def normalised():
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Softmax(-1), nn.Linear(64, 64)]
    return nn.Sequential(*layers).to("cuda"), random_input(32, 64, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_run_in_16_bits_and_what_sums_or_exponentiates_in_float32(dtype):
    """The lists of torch.amp's CUDA op reference."""
    low = str(dtype).removeprefix("torch.")
    seen = precision.audit(*normalised(), dtype=dtype)
    assert seen.device == "cuda" and seen.note == ""
    reads = {(ran.operator, ran.reads) for ran in seen.ran}
    assert reads >= {("addmm", low), ("native_layer_norm", "float32"), ("_softmax", "float32"), ("gelu", "float32")}
    assert ("gelu", low) not in reads


def test_casts_are_those_that_the_lists_ask_for():
    """Input, weight and bias twice, for two linear layers; and the first one's result for layer_norm."""
    seen = precision.audit(*normalised())
    assert seen.casts == 3 + 1 + 3
    assert seen.operators == seen.plain_operators + seen.casts


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


@pytest.mark.parametrize("call", [lambda x: F.layer_norm(x, (2048,)), lambda x: F.softmax(x, -1)])
def test_under_autocast_layer_norm_and_softmax_move_more_bytes_than_in_float32(call):
    x = random_input(4096, 2048, dtype=BF16, device="cuda")
    plain, low = counted(call, x.float()).moved_bytes, counted(call, x).moved_bytes
    with torch.autocast("cuda", BF16):
        cast = counted(call, x).moved_bytes
    assert low == pytest.approx(plain / 2, rel=0.01) and cast == pytest.approx(plain * 14 / 8, rel=0.01)


# -- TF32


def test_tf32_changes_a_product_inside_and_not_after():
    skip_without("tf32")
    a, b = (random_input(512, 512, device="cuda", seed=s) for s in (0, 1))
    before = relative_error(a @ b, a, b)
    with precision.matmul_precision("high"):
        inside = relative_error(a @ b, a, b)
    assert inside > 20 * before and relative_error(a @ b, a, b) == before


@pytest.mark.parametrize(
    ("width", "batch", "autocast", "much"),
    [(4096, 4096, False, True), (4096, 4096, True, False), (64, 8, False, False)],
    ids=["large float32", "16-bit", "tiny"],
)
def test_most_of_a_busy_step_goes_to_float32_products_only_where_they_are_large(width, batch, autocast, much):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to("cuda")
    x = random_input(batch, width, device="cuda")

    def step():
        with torch.autocast("cuda", BF16, enabled=autocast):
            loss = model(x).mean()
        loss.backward()

    products, busy = precision.float32_products(step)
    print(f"\nproducts {products:.3f}, busy {busy:.3f}")
    assert 0 <= products <= 1 and 0 < busy <= 1.2
    assert (min(products, busy) > 0.5) is much
