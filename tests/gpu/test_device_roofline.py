"""The roofs of a CUDA device against plain timings and the datasheet; regimes against what two changes do."""

import pytest
import torch

from perflab import observe, question, vary
from perflab.bench import machine, timing
from perflab.bench.timing import random_input
from perflab.roofline import checks, gpus, operators, peaks, roofline, work
from perflab.roofline.operators import OPERATORS, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.cuda_devices(), reason="no CUDA device here"),
]


def printed() -> gpus.Gpu:
    card = gpus.find(torch.cuda.get_device_name())
    return card or pytest.skip(f"{torch.cuda.get_device_name()} is not in data/gpus.toml")


# -- roofs


def test_the_bf16_roof_is_a_plain_product_and_the_copy_roof_a_plain_copy():
    """Interleaved in one run: within 3 %; and the product reaches 60 to 95 % of what is printed."""
    if why := peaks.missing("bf16"):
        pytest.skip(why)
    n, nbytes = peaks.side("bf16"), peaks.copy_bytes()

    def prepare(kind):
        if kind == "plain product":
            a, b = (random_input(n, n, dtype=torch.bfloat16, device="cuda", seed=7 + k) for k in range(2))
            return lambda: a @ b
        if kind == "plain copy":
            x = random_input(nbytes // 4, device="cuda", seed=7)
            out = torch.empty_like(x)
            return lambda: out.copy_(x)
        return peaks.copying(nbytes) if kind == "copy" else peaks.multiplying("bf16", n)

    kinds = ["bf16", "plain product", "copy", "plain copy"]
    seen = vary("call", kinds, lambda call: call(), prepare=prepare, study="t.plain", clock="device", budget_s=8)
    product, copy = seen.ratio("bf16", "plain product"), seen.ratio("copy", "plain copy")
    flops_per_s = 2 * n**3 / seen["time_s"].of("bf16").mid
    bytes_per_s = 2 * nbytes / seen["time_s"].of("copy").mid
    print(f"\nproduct {product}, copy {copy}; {flops_per_s / 1e12:.1f} TFLOP/s, {bytes_per_s / 1e12:.3f} TB/s")
    assert not seen.reasons, seen.reasons
    assert 0.97 < product.mid < 1.03 and 0.97 < copy.mid < 1.03
    card = printed()
    print(f"of the datasheet: {flops_per_s / card.peaks['bf16']:.1%}, {bytes_per_s / card.bytes_per_s:.1%}")
    assert 0.6 < flops_per_s / card.peaks["bf16"] < 0.95
    assert 0.6 < bytes_per_s / card.bytes_per_s < 1


def test_every_format_that_the_device_offers_has_a_roof_below_the_printed_one():
    seen = peaks.measure(study="t.roofs", budget_s=8)
    here = peaks.of(seen, observe("t.device", peaks.device, timed=["cache_bytes"]))
    print(f"\n{seen}\n{here}")
    offered = [kind for kind in peaks.KINDS[1:] if not peaks.missing(kind)]
    assert set(here.peaks) == set(offered), seen.reasons
    assert here.cache_bytes and here.cache_bytes > 2**20
    if torch.cuda.get_device_capability() >= (8, 0):
        assert here.peaks["fp32"] < here.peaks["tf32"] < here.peaks["bf16"]
    card = printed()
    for kind in set(offered) & set(card.peaks):
        print(f"{kind}: {here.peaks[kind] / card.peaks[kind]:.1%} of what is printed")
        assert here.peaks[kind] < 1.05 * card.peaks[kind], "a boost above the printed clock is possible, no more"
        assert here.peaks[kind] > 0.5 * card.peaks[kind]


def relative_error(got, a, b) -> float:
    exact = a.double() @ b.double()
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_fp32_products_are_not_tf32_ones_and_the_setting_is_left_as_it_was(monkeypatch):
    if why := peaks.missing("tf32"):
        pytest.skip(why)
    a, b = (random_input(512, 512, device="cuda", seed=s) for s in (0, 1))
    outs = []
    kept = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, out: outs.append(kept(*args, out=out)))
    for before in ("highest", "high"):
        torch.set_float32_matmul_precision(before)
        try:
            for dtype in ("fp32", "tf32"):
                peaks.multiplying(dtype, 512)()
            assert torch.get_float32_matmul_precision() == before
        finally:
            torch.set_float32_matmul_precision("highest")
    errors = [relative_error(out, a, b) for out in outs]
    print(f"\nrelative errors, fp32 and tf32, twice: {errors}")
    assert max(errors[0::2]) < 1e-5 < 1e-4 < min(errors[1::2])


def test_the_fp8_product_is_the_product_of_the_rounded_matrices():
    if why := peaks.missing("fp8"):
        pytest.skip(why)
    a, b = (random_input(256, 256, device="cuda", seed=s).to(torch.float8_e4m3fn).float() for s in (0, 1))
    got = peaks.multiplying("fp8", 256)()
    assert got.dtype is torch.bfloat16
    assert relative_error(got, a, b.t()) < 0.01


# -- regimes


@pytest.mark.parametrize("name", sorted(operators.ALL))
def test_the_formulas_are_what_a_count_gives_on_the_device(name):
    operator, rows, n = operators.ALL[name], 96, 64
    x, y, out = (torch.ones(rows, n, device="cuda") for _ in range(3))
    y = torch.ones(n, n, device="cuda") if name == "matmul" else y
    seen, said = work.counted(operator.call, x, y, out), operator.work(rows, n, "fp32")
    kept = {"layer_norm": 2 * rows * 4, "sum": 4}.get(name, 0)
    assert (seen.flops, seen.bytes_read) == (said.flops, said.bytes_read)
    assert seen.bytes_written == said.bytes_written + kept


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("PERFLAB_HOME", str(home))
        patch.setenv("PERFLAB_SEATS", str(home / "seats"))
        patch.setenv("PERFLAB_PROGRESS", "off")
        here = peaks.of(peaks.measure(study="t.roofs", budget_s=5))
        tensors = operators.Tensors()

        def ready(case):
            return operators.prepared(case, tensors)

        seen = vary("operator", operators.grid(), lambda call: call(), prepare=ready, study="t.ops", budget_s=12)
        assert not seen.reasons, seen.reasons
        print(f"\n{seen}")
        rows = checks.checks(seen, checks.raised(here, seen))
        for c in rows:
            print(
                f"{c.case.label:18} {c.placed.regime:10} at least {c.placed.bound_s:.3g} s, {c.time_s:.3g} s; "
                f"twice the rows x {c.twice:.2f} {c.size_agrees}, half the bytes x {c.half:.2f} {c.bytes_agree}"
            )
        for name in ("add", "gelu", "layer_norm", "softmax"):
            print(f"{name}: {checks.part_of_copy(seen, name)} of the copy's bytes a second")
        return {c.case.label: c for c in rows}


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
    c = found[label]
    assert c.bytes_agree, (c.placed.regime, c.half)


def test_nothing_large_beats_its_bound(found):
    for name in OPERATORS:
        c = found[f"{name} large"]
        assert c.time_s > 0.93 * c.placed.bound_s, c.case.label


def test_a_copy_out_of_the_cache_is_timed_without_its_launch():
    """16 MiB twice fit the L2 of large cards; queued ahead, they are not limited by how fast the host starts them."""
    x = random_input(2**22, device="cuda")
    out = torch.empty_like(x)
    queued = min(peaks.in_a_row(lambda: out.copy_(x), 16) for _ in range(5))
    small = random_input(256, device="cuda")
    to = torch.empty_like(small)
    tiny = min(peaks.in_a_row(lambda: to.copy_(small), 50) for _ in range(5))
    launched = min(timing.wall(lambda: to.copy_(small), 50, 5)[0])
    print(
        f"\n16 MiB: {2 * x.nbytes / queued / 1e12:.2f} TB/s; 1 KiB: {tiny * 1e6:.1f} us queued, {launched * 1e6:.1f} us"
    )
    assert tiny < launched and 2 * x.nbytes / queued > 1e11


# -- the explorer and the exercise


def test_the_explorer_takes_the_measured_roofs():
    explorer = roofline.explore_roofline(peaks.of(peaks.measure(study="t.roofs", budget_s=2)))
    assert explorer.error is None and "measured roofs" in explorer.caption.value


def test_the_reference_answer_is_correct_and_a_wrong_one_hears_which():
    q = question("05.1")
    right = eval(q.problem.solution)
    outcome, wrong = q.check(right), q.check(right | {"d": "arithmetic"})
    print(f"\n{outcome}\n{wrong}")
    assert outcome.state == "Correct"
    assert wrong.state == "Not right" and wrong.sentence.startswith("d is not arithmetic")
