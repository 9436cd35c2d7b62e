"""The roofline: what is printed about cards, what is measured, the three regimes, the picture, the exercises."""

import itertools
import math
import time
import tomllib
from dataclasses import replace

import pytest
import torch
from matplotlib.text import Text

from perflab import PerflabError, paths, question, vary
from perflab.bench import machine
from perflab.bench.estimate import NOT
from perflab.bench.result import Result
from perflab.roofline import checks, exercises, gpus, operators, peaks, roofline
from perflab.roofline.operators import CHANGES, OPERATORS, SIZES, TWICE, OperatorCall, grid, label
from perflab.roofline.roofline import ARITHMETIC, BANDWIDTH, OVERHEAD
from perflab.roofline.work import Work, counted

H200 = gpus.Roofs("nvidia-h200", 4.2e12, {"fp32": 51e12, "tf32": 400e12, "bf16": 763e12, "fp16": 736e12}, 60 * 2**20)
HERE = gpus.Roofs("this machine", 1e10, {"fp32": 1e11, "bf16": 1e9}, 2**25)
ON_H200 = {"cuda": "13.0", "gpus": ["NVIDIA H200"], "cores": 16, "cpu": "x", "driver": "1", "torch": "2"}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the device's own tests do this where there is one")


def planted(study, seconds, **fields):
    """A result of eight rounds that rise by 2 % each, with these seconds by value."""
    samples = {name: [(r, [s * (1 + r / 50)]) for r in range(8)] for name, s in seconds.items()}
    return Result(study, 1, "call", list(seconds), {"time_s": samples}, machine=ON_H200, **fields)


# -- cards


# The dense bf16 peak of torchtitan's get_peak_flops and of stas00/ml-engineering, in TFLOP/s; multiprocessors, FLOP a
# clock and multiprocessor with fp32 accumulation, clock in GHz; bits of the bus, data rate in Gbit/s.
CARDS = """
T4                 -     -     -  -      256  10
L4                 -     -     -  -      192  12.5
L40S             362     -     -  -      384  18
A100 SXM 40 GB     -   108  2048  1.41     -  -
A100 PCIe 40 GB  312     -     -  -        -  -
A100 SXM 80 GB   312     -     -  -        -  -
A100 PCIe 80 GB    -     -     -  -        -  -
H100 SXM         989   132  4096  1.83     -  -
H100 PCIe        756     -     -  -        -  -
H200             989     -     -  -        -  -
B200            2250     -     -  -        -  -
RTX 3060           -    28   512  1.78   192  15
RTX 3090           -    82   512  1.695  384  19.5
RTX 4060 Laptop    -    24   512  2.37   128  16
RTX 4090           -   128   512  2.52   384  21
RTX 5090           -   170   512  2.407  512  28
"""
FILE = {card["name"]: card for card in tomllib.loads((paths.DATA / "gpus.toml").read_text())["gpu"]}


@pytest.mark.parametrize("line", CARDS.strip().splitlines())
def test_a_card_has_the_figures_of_other_tables_and_a_document(line):
    name, *figures = line.rsplit(maxsplit=6)
    dense, sms, each, ghz, bits, gbit = (math.nan if x == "-" else float(x) for x in figures)
    card = gpus.known()[name]
    assert math.isnan(dense) or card.peaks["bf16"] / 1e12 == pytest.approx(dense, rel=1e-3)
    if not math.isnan(sms):
        assert FILE[name]["sms"] == sms and card.peaks["bf16"] == pytest.approx(sms * each * ghz * 1e9, rel=5e-3)
    assert math.isnan(bits) or card.bytes_per_s == pytest.approx(bits / 8 * gbit * 1e9, rel=2e-3)
    assert any(word in card.source for word in ("whitepaper", "datasheet", "Technical Brief"))


@pytest.mark.parametrize("card", gpus.known().values(), ids=lambda card: card.name)
def test_formats_stand_in_the_ratios_of_their_hardware(card):
    capability = tuple(map(int, FILE[card.name]["capability"].split(".")))
    assert ("bf16" in card.peaks) == (capability >= (8, 0))
    assert "fp8" not in card.peaks or capability >= (8, 9)
    if "bf16" in card.peaks:
        assert card.peaks["bf16"] == card.peaks["fp16"] == pytest.approx(2 * card.peaks["tf32"], rel=0.025)
    if "fp8" in card.peaks:
        assert card.peaks["fp8"] == pytest.approx(2 * card.peaks["bf16"], rel=0.02)
    if card.name.startswith("RTX"):
        assert card.peaks["tf32"] == card.peaks["fp32"]


def test_the_ridge_of_a_card_is_what_its_figures_divide_to():
    assert gpus.known()["H200"].ridge("bf16") == pytest.approx(206, abs=0.5)
    assert gpus.known()["H100 SXM"].ridge("bf16") == pytest.approx(295, abs=0.5)
    assert math.isnan(gpus.known()["A100 SXM 40 GB"].ridge("fp8"))


NAMES = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA A100-SXM4-80GB": "A100 SXM 80 GB"}
NAMES |= {"NVIDIA GeForce RTX 4060 Laptop GPU": "RTX 4060 Laptop", "Tesla T4": "T4"}
NAMES |= dict.fromkeys(
    ["NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H200 NVL", ""]
)


@pytest.mark.parametrize(("driver_says", "card"), NAMES.items())
def test_a_card_is_found_by_its_whole_name_only(driver_says, card):
    found = gpus.find(driver_says)
    assert (found and found.name) == card


def test_the_file_of_cards_has_a_name_once_and_only_figures_above_zero():
    fields = {"name", "names", "capability", "bandwidth", "peak", "source", "sms", "memory", "l2"}
    names = []
    for name, card in FILE.items():
        assert fields - {"sms", "memory", "l2"} <= set(card) <= fields, name
        assert card["peak"] and set(card["peak"]) <= set(gpus.FORMATS), name
        figures = [card[key] for key in ("bandwidth", "sms", "memory", "l2") if key in card]
        assert all(0 < x < math.inf for x in [*figures, *card["peak"].values()]), name
        names += [name.lower().removeprefix("nvidia ") for name in {name, *card["names"]}]
    assert len(names) == len(set(names))


# -- placing


@pytest.mark.parametrize(
    ("flops", "moved", "overhead_s", "regime", "bound_s"),
    [
        (763e12, 4.2e12, 0.1, ARITHMETIC, 1.0),
        (763e12, 8.4e12, 0.1, BANDWIDTH, 2.0),
        (763e9, 4.2e9, 0.1, OVERHEAD, 0.1),
        (0, 4.2e12, 0.0, BANDWIDTH, 1.0),
    ],
)
def test_the_longest_of_three_times_is_the_regime(flops, moved, overhead_s, regime, bound_s):
    placed = roofline.place(Work(1, flops, moved), H200, "bf16", overhead_s)
    assert placed.regime == regime and placed.bound_s == pytest.approx(bound_s)


@pytest.mark.parametrize(
    ("roofs", "moved", "cached"), [(H200, 2**20, True), (H200, 2**30, False), (gpus.known()["T4"], 1, False)]
)
def test_what_fits_the_cache_is_said(roofs, moved, cached):
    assert roofline.place(Work(1, 1, moved), roofs, "fp32").cached is cached


def test_a_format_without_a_roof_names_those_that_are_there():
    with pytest.raises(PerflabError, match="T4 has no roof for bf16: it has fp32, fp16"):
        roofline.place(Work(1, 1, 1), gpus.known()["T4"], "bf16")


def test_other_cards_are_a_table_with_empty_cells_where_nothing_is_printed():
    table = roofline.across({"matmul": OperatorCall("matmul", 4096, 4096, "bf16", columns=4096)})
    assert list(table.index) == list(gpus.known())
    assert table.loc["T4", "matmul"] == "" and table.loc["H200", "ridge, bf16"] == "206"
    assert table.loc["H200", "matmul"] == "arithmetic, 139 us"  # 2 * 4096^3 / 989.5e12


# -- operators


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(operators.ALL))
def test_the_formulas_are_what_a_count_of_the_call_gives(name, dtype, each_device, monkeypatch):
    monkeypatch.setattr(machine, "device", lambda: each_device)
    call = OperatorCall(name, 96, 64, dtype, columns=32 if name == "matmul" else 0)
    seen, said = counted(call.ready({})), call.work
    assert seen.unknown == ()
    assert (seen.flops, seen.bytes_read) == (said.flops, said.bytes_read)
    item = operators.ITEM_BYTES[dtype]
    statistic = 4 if each_device == "cuda" else item  # a mean and a root a row, in float32 on CUDA
    kept = {"layer_norm": 2 * 96 * statistic, "sum": item}.get(name, 0)
    assert seen.bytes_written == said.bytes_written + kept


@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_changes_change_one_thing(on):
    calls = grid(on=on)
    for name, size in itertools.product(OPERATORS, SIZES):
        as_it_is, twice, half = (calls[label(name, size, change)].work for change in CHANGES)
        assert twice.flops == 2 * as_it_is.flops and half.flops == as_it_is.flops
        assert half.moved_bytes == as_it_is.moved_bytes / 2
        assert 1.6 < twice.moved_bytes / as_it_is.moved_bytes <= 2
    assert len(calls) == len(OPERATORS) * len(SIZES) * len(CHANGES) + len(operators.PROBES)


def test_results_are_right_and_inputs_are_shared():
    tensors = {}
    for name in OPERATORS:
        grid(["small"])[f"{name} small"].ready(tensors)()
    x, y, out = (tensors[16, 16, "fp32", seed] for seed in range(3))
    assert torch.allclose(out, x @ y), "the last operator wrote into the shared result"
    assert len(tensors) == 3


# -- the interventions


def modelled(overhead_s=6e-6, slow=()):
    """A result whose times are the model's on an H200; `slow` operators take what their numbers take, not bytes."""
    seconds = {}
    for name, call in grid(on="cuda").items():
        seconds[name] = roofline.place(call.work, H200, call.roof, overhead_s).bound_s * 1.1
        if call.operator in slow:
            seconds[name] = max(overhead_s, call.rows * call.n * 5e-12)
    return planted("t.ops", seconds, source="nvidia-h200")


def checked(result):
    return {check.label: check for check in checks.checks(result, H200)}


def test_a_machine_that_follows_the_model_agrees_everywhere():
    found = checked(modelled())
    assert len(found) == 15 and all(c.size_agrees and c.bytes_agree for c in found.values())
    large = {name: found[f"{name} large"].placed.regime for name in OPERATORS}
    assert large == dict.fromkeys(OPERATORS, BANDWIDTH) | {"matmul": ARITHMETIC}
    assert {found[f"{name} small"].placed.regime for name in OPERATORS} == {OVERHEAD}


def test_a_study_without_the_medium_size_is_checked_at_two():
    result = modelled()
    result.values = list(grid(["small", "large"]))
    assert list(checked(result)) == [f"{name} {size}" for name in OPERATORS for size in ("small", "large")]


def test_a_kernel_below_its_roof_is_shown_by_the_bytes_and_not_by_the_size():
    found = checked(modelled(slow=["softmax"]))
    assert found["softmax large"].size_agrees and not found["softmax large"].bytes_agree
    assert found["gelu large"].size_agrees and found["gelu large"].bytes_agree


def test_a_wrong_regime_is_refuted_by_twice_the_rows():
    flat = checked(modelled(overhead_s=5e-3))["add large"]  # starting takes so long that twice the rows take as long
    assert flat.placed.regime == OVERHEAD and flat.size_agrees
    wrong = replace(flat, placed=checked(modelled())["add large"].placed)
    assert wrong.placed.regime == BANDWIDTH and not wrong.size_agrees


def test_a_failed_case_is_a_row_with_its_reason():
    result = modelled()
    del result.samples["time_s"]["gelu large"]
    result.reasons["gelu large"] = "prepare: out of memory"
    table = checks.Verdicts(result, checks.checks(result, H200))
    assert "out of memory" in table.html() and table.html().count("<tr>") == 16
    assert [p.name for p in checks.points(table.checks)].count("gelu") == 2


def test_a_roof_is_the_best_that_was_seen():
    low = gpus.Roofs("x", 1e12, {"fp32": 1e12}, 60 * 2**20)
    high = gpus.Roofs("x", 9e12, {"fp32": 9e15, "bf16": 9e15})
    raised = checks.raised(low, modelled())
    assert 0.8 * 4.2e12 < raised.bytes_per_s < 4.2e12 and 0.8 * 51e12 < raised.peaks["fp32"] < 51e12
    assert 0.8 * 763e12 < raised.peaks["bf16"] < 763e12
    assert checks.raised(high, modelled()) == high
    assert checks.raised(replace(low, cache_bytes=2**40), modelled()).bytes_per_s == 1e12


# -- measured roofs


@pytest.fixture
def small(monkeypatch, one_thread):
    """A copy of 128 MiB: what is compared is compared at that size on both sides."""
    monkeypatch.setattr(peaks, "cpu_cache_bytes", lambda: 2**20)


def roof_result(**seconds):
    done = {kind: 2.0 * 2**30 if kind == "copy" else 2.0 * 8192**3 for kind in seconds}
    reasons = {kind: f"prepare: no {kind} here" for kind in peaks.KINDS if kind not in seconds}
    result = planted("05.roofs", seconds, work=done, reasons=reasons)
    result.values = list(peaks.KINDS)
    return result


def test_a_roof_is_work_over_time():
    result = roof_result(copy=0.51e-3, bf16=1.44e-3)
    assert peaks.rate(result, "copy").mid == pytest.approx(2 * 2**30 / 0.51e-3, rel=0.1)
    assert peaks.rate(result, "bf16").hi == pytest.approx(2 * 8192**3 / 1.44e-3, rel=0.03)
    here = peaks.of(result)
    assert set(here.peaks) == {"bf16"} and here.name == "this machine" and here.cache_bytes is None
    assert here.ridge("bf16") == pytest.approx(here.peaks["bf16"] / here.bytes_per_s)
    with pytest.raises(PerflabError, match="no copy"):
        peaks.of(roof_result(bf16=1.44e-3))


def test_measured_stands_beside_printed_with_its_share_and_the_document():
    shown = peaks.Beside(roof_result(copy=0.51e-3, bf16=1.44e-3), gpus.sheet(["NVIDIA H200"]))
    assert 0.6 < shown.share("bf16") < 0.95 and 0.8 < shown.share("copy") < 1
    for text in ("989.5 TFLOP/s", "no fp8 here", "H200 Tensor Core GPU datasheet"):
        assert text in shown.html()


@pytest.mark.parametrize(
    ("boards", "sentence"), [([], "no GPU here"), (["NVIDIA <X> 9000"], "NVIDIA &lt;X&gt; 9000 is not in data/gpus")]
)
def test_an_unknown_card_and_none_are_one_sentence_and_no_error(boards, sentence):
    bare = peaks.Beside(roof_result(copy=1.0), gpus.sheet(boards))
    assert sentence in bare.html() and math.isnan(bare.share("copy"))
    assert repr(bare) == "Roofs, measured and printed: copy, fp32, tf32, bf16, fp16, fp8"


@ON_CPU
def test_calls_in_a_row_take_what_one_takes():
    assert 0.01 < peaks.in_a_row(lambda: time.sleep(0.01), 3) < 0.1


@ON_CPU
def test_the_roofs_of_a_processor_are_those_of_a_plain_loop(small, note):
    n = peaks.side("fp32")
    a, b, out = (torch.randn(n, n) for _ in range(3))
    x, to = torch.randn(peaks.copy_bytes() // 4), torch.zeros(peaks.copy_bytes() // 4)
    calls = {
        "copy": peaks.copying(peaks.copy_bytes()),
        "plain copy": lambda: to.copy_(x),
        "fp32": peaks.multiplying("fp32", n),
        "plain product": lambda: torch.mm(a, b, out=out),
    }
    seen = vary("call", calls, lambda call: call(), study="t.plain", budget_s=1)
    for ours, plain in (("copy", "plain copy"), ("fp32", "plain product")):
        ratio = seen.ratio(ours, plain)
        note(f"{ours} roof over a plain one: {ratio}")
        assert ratio.within(0.67, 1.5).state != NOT


def test_the_measurement_has_a_row_for_every_format_and_says_what_is_left_out(small):
    seen = peaks.measure(study="t.roofs", kinds=("copy", "fp32", "fp8"), budget_s=0.1)
    if not torch.cuda.is_available():
        assert seen.reasons == {"fp8": "prepare: fp8 is left out on a processor"}
    assert peaks.of(seen).bytes_per_s > 1e8 and peaks.of(seen).peaks["fp32"] > 1e8


def test_the_cache_is_that_of_this_machine_or_not_known():
    cache = peaks.device()["cache"]["cache_bytes"]
    assert math.isnan(cache) or 2**15 <= cache < 2**34


# -- the picture and the explorer


def test_the_names_in_the_picture_do_not_overlap(monkeypatch):
    drawn, figure = [], roofline.style.figure
    monkeypatch.setattr(roofline.style, "figure", lambda **size: drawn.append(figure(**size)) or drawn[-1])
    points = checks.points(checks.checks(modelled(), H200))
    picture = roofline.picture(H200, points, gpus.known()["H200"], [gpus.Roofs("other", 1e11, {"fp32": 1e12})])
    assert picture.data[:4] == b"\x89PNG" and "points of add, gelu" in picture.alt
    fig, ax = drawn[0]
    fig.draw_without_rendering()
    boxes = {t.get_text(): Text.get_window_extent(t) for t in ax.texts}  # without the lines to the points
    assert {"printed", "fp32", "matmul", "softmax", "other, fp32"} <= set(boxes)
    for (one, a), (two, b) in itertools.combinations(boxes.items(), 2):
        inner = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert inner[0] < 1 or inner[1] < 0.35 * min(a.height, b.height), (one, two)


def test_the_picture_needs_no_points_and_no_sheet():
    assert "points" not in roofline.picture(HERE).alt
    assert roofline.picture(H200, beside=[gpus.Roofs("no fp32", 1e11, {"bf16": 1e12})]).data[:4] == b"\x89PNG"
    with pytest.raises(PerflabError, match="no arithmetic roof"):
        roofline.picture(replace(HERE, peaks={}))


def test_the_explorer_says_whose_roofs_it_shows_and_which_are_missing():
    explorer = roofline.explore_roofline(HERE, 3e-6)
    for device, dtype, sentence in [
        ("this machine", "fp32", "A model over measured roofs, with 3.00 us to start a call: nothing is timed here"),
        ("this machine", "fp8", "No fp8 roof is measured for this machine"),
        ("H200", "fp8", "printed roofs"),
    ]:
        for control, value in {"operator": "matmul", "dtype": dtype, "device": device}.items():
            explorer.controls[control].value = value
        assert explorer.error is None and sentence in explorer.caption.value


# -- exercises


def test_the_pen_and_paper_question():
    q = question("05.2")
    right = eval(q.problem.solution)
    assert right == pytest.approx(124.1, abs=0.1)
    assert q.check(right).state == q.check(124).state == "Correct"
    said = {312: "arithmetic roof", 156: "ridge", 62.06: "multiply-add", 126.03: "written", 248.2: "how many bytes"}
    said |= {128: "not the weights alone", 5: "FLOPs over bytes", "124": "number"}
    for answer, word in said.items():
        outcome = q.check(answer)
        assert outcome.state == "Not right" and word in outcome.sentence, answer


@pytest.fixture
def exercised(monkeypatch):
    """exercised(b=1.0): the exercise finds the times of the model; of `b`, twice the size takes this many times it."""
    seconds = {"copy": 0.51e-3, "fp32": 21.6e-3}
    here = gpus.Roofs("x", 2 * 2**30 / 0.51e-3, {"fp32": 2 * 8192**3 / 21.6e-3})
    for letter, call in exercises.CALLS.items():
        for name, one in ((letter, call), (f"{letter}, larger", exercises.larger(call))):
            seconds[name] = max(6e-6, roofline.place(one.work, here, "fp32").bound_s)

    def measured(**larger):
        times = seconds | {f"{letter}, larger": seconds[letter] * x for letter, x in larger.items()}
        result = planted("05.exercise", times, work={"copy": 2.0 * 2**30, "fp32": 2.0 * 8192**3})
        monkeypatch.setattr(exercises, "_measured", lambda: result)

    measured()
    return measured


REGIMES = {"a": OVERHEAD, "b": BANDWIDTH, "c": ARITHMETIC, "d": BANDWIDTH, "e": OVERHEAD}


@pytest.mark.parametrize("letter", REGIMES)
def test_a_wrong_regime_is_named(letter, exercised):
    q = question("05.1")
    assert q.check(REGIMES).state == q.check(eval(q.problem.solution)).state == "Correct"
    wrong = ARITHMETIC if REGIMES[letter] != ARITHMETIC else BANDWIDTH
    outcome = q.check(REGIMES | {letter: wrong})
    assert outcome.state == "Not right" and outcome.sentence.startswith(f"{letter} is not {wrong}: ")


def test_where_the_machine_does_not_follow_the_model_nobody_is_wrong(exercised):
    exercised(b=1.0)
    outcome = question("05.1").check(REGIMES)
    assert outcome.state == "CANNOT TELL" and "b:" in outcome.sentence


@pytest.mark.parametrize(
    ("answer", "word"), [(7, "each letter"), ({"a": OVERHEAD}, "each letter"), (REGIMES | {"a": "fast"}, "not fast")]
)
def test_an_answer_of_another_form_hears_the_form(answer, word):
    outcome = question("05.1").check(answer)
    assert outcome.state == "Not right" and word in outcome.sentence


@pytest.mark.timed
@pytest.mark.slow
def test_the_reference_answer_is_never_called_wrong_here(small, note):
    outcome = question("05.1").check(REGIMES)
    note(f"05.1 here: {outcome}")
    assert outcome.state in ("Correct", "CANNOT TELL")


@pytest.mark.slow
def test_regimes_agree_with_twice_the_rows_on_this_machine(small, note):
    """The large and the small sizes of all five operators; a busy machine may leave a few marks to chance."""
    calls = {name: call for name, call in grid(["small", "large"]).items() if call.dtype == "fp32"}
    tensors = {}
    seen = vary("operator", calls, lambda f: f(), prepare=lambda c: c.ready(tensors), study="t.ops", budget_s=2)
    here = gpus.Roofs("this machine", 1e10, {"fp32": 1e11})
    wrong = []
    for name, size in itertools.product(OPERATORS, ("small", "large")):
        twice = seen.ratio(label(name, size, TWICE), label(name, size))
        regime = roofline.place(calls[label(name, size)].work, here, "fp32", 2e-6).regime
        assert (regime == OVERHEAD) == (size == "small")
        finding = twice.at_most(math.sqrt(2)) if size == "small" else twice.at_least(math.sqrt(2))
        if finding.state == NOT:
            wrong.append((name, size, str(twice)))
    note(f"regimes refuted by twice the rows: {wrong or 'none'}")
    assert len(wrong) <= 1
