"""The roofline: what is printed about cards, what is measured, the three regimes, the picture, the exercises."""

import contextlib
import itertools
import math
import time
import tomllib
from dataclasses import replace

import pytest
import torch
from matplotlib.text import Text

from perflab import PerflabError, paths, question, vary
from perflab.bench.estimate import HOLDS, NOT
from perflab.bench.result import Result
from perflab.roofline import checks, gpus, operators, peaks, roofline, work
from perflab.roofline import exercises as problems
from perflab.roofline.operators import CHANGES, OPERATORS, SIZES, OperatorCase
from perflab.roofline.roofline import ARITHMETIC, BANDWIDTH, OVERHEAD

H200 = peaks.Roofs("nvidia-h200", 4.2e12, {"fp32": 51e12, "tf32": 400e12, "bf16": 763e12, "fp16": 736e12}, 60 * 2**20)


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


@pytest.mark.parametrize("line", CARDS.strip().splitlines())
def test_a_card_has_the_figures_of_other_tables_and_a_document(line):
    name, *figures = line.rsplit(maxsplit=6)
    dense, sms, each, ghz, bits, gbit = (math.nan if x == "-" else float(x) for x in figures)
    card = gpus.known()[name]
    assert math.isnan(dense) or card.peaks["bf16"] / 1e12 == pytest.approx(dense, rel=1e-3)
    if not math.isnan(sms):
        assert card.sms == sms and card.peaks["bf16"] == pytest.approx(sms * each * ghz * 1e9, rel=5e-3)
    assert math.isnan(bits) or card.bytes_per_s == pytest.approx(bits / 8 * gbit * 1e9, rel=2e-3)
    assert any(word in card.source for word in ("whitepaper", "datasheet", "Technical Brief"))


def test_formats_stand_in_the_ratios_of_their_hardware():
    for card in gpus.known().values():
        peaks = card.peaks
        geforce = card.name.startswith("RTX")
        if "bf16" in peaks:
            assert peaks["bf16"] == peaks["fp16"], card.name
            assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.025), card.name
        if "fp8" in peaks:
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02), card.name
        if geforce:
            assert peaks["tf32"] == peaks["fp32"], card.name
        capability = tuple(map(int, card.capability.split(".")))
        assert ("bf16" in peaks) == (capability >= (8, 0)), card.name
        assert "fp8" not in peaks or capability >= (8, 9), card.name


def test_the_ridge_of_an_h200_is_what_its_figures_divide_to():
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


def test_an_unknown_card_and_none_are_one_sentence_and_no_error():
    unknown, none = gpus.sheet(["NVIDIA <Something> 9000"]), gpus.sheet([])
    assert unknown.gpu is none.gpu is None
    assert "not in data/gpus.toml" in unknown.sentence and "no GPU here" in none.sentence
    assert "&lt;Something&gt;" in unknown.html()
    assert "H200 Tensor Core GPU datasheet" in gpus.sheet(["NVIDIA H200"]).sentence


def test_the_file_of_cards_has_a_name_once_and_only_figures_above_zero():
    fields = {"name", "names", "capability", "bandwidth", "peak", "source", "sms", "memory", "l2"}
    names = []
    for table in tomllib.loads((paths.DATA / "gpus.toml").read_text())["gpu"]:
        assert fields - {"sms", "memory", "l2"} <= set(table) <= fields, table["name"]
        assert table["peak"] and set(table["peak"]) <= set(gpus.FORMATS), table["name"]
        figures = [table[key] for key in ("bandwidth", "sms", "memory", "l2") if key in table]
        assert all(0 < x < math.inf for x in [*figures, *table["peak"].values()]), table["name"]
        names += [name.lower().removeprefix("nvidia ") for name in {table["name"], *table["names"]}]
    assert len(names) == len(set(names))


# -- placing


def counted(flops, moved):
    return work.Work(1, flops, moved // 2, moved - moved // 2)


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
    placed = roofline.place(counted(flops, moved), H200, "bf16", overhead_s)
    assert placed.regime == regime and placed.bound_s == pytest.approx(bound_s)


def test_what_fits_the_cache_is_said():
    assert roofline.place(counted(1, 2**20), H200, "fp32").cached
    assert not roofline.place(counted(1, 2**30), H200, "fp32").cached
    unknown = peaks.Roofs("x", 1e12, {"fp32": 1e12})
    assert not roofline.place(counted(1, 1), unknown, "fp32").cached


def test_a_format_without_a_roof_names_those_that_are_there():
    with pytest.raises(PerflabError, match="T4 has no roof for bf16: it has fp32, fp16"):
        roofline.place(counted(1, 1), gpus.known()["T4"], "bf16")


def test_other_cards_are_a_table_with_empty_cells_where_nothing_is_printed():
    product = OPERATORS["matmul"].work(4096, 4096, "bf16")
    table = roofline.across({"matmul": (product, "bf16")})
    assert list(table.index) == list(gpus.known())
    assert table.loc["T4", "matmul"] == "" and table.loc["H200", "ridge, bf16"] == "206"
    assert table.loc["H200", "matmul"] == "arithmetic, 139 us"  # 2 * 4096^3 / 989.5e12


# -- operators


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(operators.ALL))
def test_the_formulas_are_what_a_count_of_the_call_gives(name, dtype):
    operator, rows, n = operators.ALL[name], 96, 64
    x, y, out = (torch.ones(rows, n, dtype=peaks.DTYPES[dtype]) for _ in range(3))
    y = torch.ones(n, n, dtype=x.dtype) if name == "matmul" else y
    seen, said = work.counted(operator.call, x, y, out), operator.work(rows, n, dtype)
    assert seen.unknown == ()
    assert (seen.flops, seen.bytes_read) == (said.flops, said.bytes_read)
    kept = {"layer_norm": 2 * rows * x.element_size(), "sum": x.element_size()}.get(name, 0)  # a mean and a root a row
    assert seen.bytes_written == said.bytes_written + kept


@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_changes_change_one_thing(on):
    for name, size in itertools.product(OPERATORS, SIZES):
        as_it_is, twice, half = (OperatorCase(name, size, change).work(on) for change in CHANGES)
        assert twice.flops == 2 * as_it_is.flops and half.flops == as_it_is.flops
        assert half.moved_bytes == as_it_is.moved_bytes / 2
        assert 1.6 < twice.moved_bytes / as_it_is.moved_bytes <= 2
    assert len(operators.grid()) == len(OPERATORS) * len(SIZES) * len(CHANGES) + len(operators.PROBES)


def test_a_study_without_the_medium_size_is_checked_at_two():
    result = modelled()
    result.values = list(operators.grid(["small", "large"]))
    assert [c.case.size for c in checks.checks(result, H200)] == ["small", "large"] * len(OPERATORS)


def test_results_are_right_and_inputs_are_shared():
    tensors = operators.Tensors()
    for name in OPERATORS:
        operators.prepared(OperatorCase(name, "small"), tensors)()
    x, y = tensors.get(16, 16, "fp32"), tensors.get(16, 16, "fp32", 1)
    assert torch.equal(tensors.get(16, 16, "fp32", 2), x @ y), "the last operator wrote into the shared result"
    assert len(tensors._made) == 3
    tensors.clear()
    assert not tensors._made


# -- the interventions


def modelled(overhead_s=6e-6, slow=()):
    """A result whose times are the model's on an H200; `slow` operators take what their numbers take, not bytes."""
    times = {}
    for label, case in operators.grid().items():
        operator = operators.ALL[case.operator]
        w = case.work("cuda")
        placed = roofline.place(w, H200, operator.roof(case.dtype), overhead_s)
        times[label] = placed.bound_s * 1.1
        if case.operator in slow:
            times[label] = max(overhead_s, math.prod(case.shape("cuda")) * 5e-12)
    samples = {label: [(r, [t * (1 + r / 50)]) for r in range(8)] for label, t in times.items()}
    machine = {"cuda": "13.0", "gpus": ["NVIDIA H200"], "cores": 16, "cpu": "x", "driver": "1", "torch": "2"}
    return Result("t.ops", 1, "operator", list(times), {"time_s": samples}, machine=machine, source="nvidia-h200")


def test_a_machine_that_follows_the_model_agrees_everywhere():
    found = checks.checks(modelled(), H200)
    assert len(found) == 15 and all(c.size_agrees and c.bytes_agree for c in found)
    at_large = {c.case.operator: c.placed.regime for c in found if c.case.size == "large"}
    assert at_large == dict.fromkeys(OPERATORS, BANDWIDTH) | {"matmul": ARITHMETIC}
    assert {c.placed.regime for c in found if c.case.size == "small"} == {OVERHEAD}


def test_a_kernel_below_its_roof_is_shown_by_the_bytes_and_not_by_the_size():
    found = {c.case.label: c for c in checks.checks(modelled(slow=["softmax"]), H200)}
    assert found["softmax large"].size_agrees and not found["softmax large"].bytes_agree
    assert found["gelu large"].size_agrees and found["gelu large"].bytes_agree


def test_a_wrong_regime_is_refuted_by_twice_the_rows():
    result = modelled(overhead_s=5e-3)  # starting takes so long that all but the largest product is flat
    found = {c.case.label: c for c in checks.checks(result, H200)}
    assert found["add large"].placed.regime == OVERHEAD and found["add large"].size_agrees
    with_small_overhead = replace(found["add large"], placed=checks.checks(modelled(), H200)[2].placed)
    assert with_small_overhead.placed.regime == BANDWIDTH and not with_small_overhead.size_agrees


def test_a_failed_case_is_a_row_with_its_reason():
    result = modelled()
    del result.samples["time_s"]["gelu large"]
    result.reasons["gelu large"] = "prepare: out of memory"
    table = checks.Verdicts(result, checks.checks(result, H200))
    assert "out of memory" in table.html() and table.html().count("<tr>") == 16
    assert checks.lines(table.checks)[1][0].name == "gelu" and len(checks.lines(table.checks)[1]) == 2


def test_parts_of_the_copy_are_bytes_over_bytes():
    part = checks.part_of_copy(modelled(), "add")
    assert part.mid == pytest.approx(1) and part.at_least(0.9).state == HOLDS
    assert checks.part_of_copy(modelled(slow=["softmax"]), "softmax").at_most(2).state == HOLDS


def test_percent_of_a_roof_is_flops_over_time_over_roof():
    seen = checks.percent_of_roof(modelled(), OperatorCase("matmul", "large"), H200)
    assert seen.lo <= seen.mid <= seen.hi and seen.hi == pytest.approx(100 / 1.1, rel=0.05)
    bound = 100 * OPERATORS["add"].work(1, 1, "fp32").intensity / H200.ridge("fp32")
    assert checks.percent_of_roof(modelled(), OperatorCase("add", "large"), H200).at_most(bound).state == HOLDS


def test_a_roof_is_the_best_that_was_seen():
    low = peaks.Roofs("x", 1e12, {"fp32": 1e12}, 60 * 2**20)
    high = peaks.Roofs("x", 9e12, {"fp32": 9e15, "bf16": 9e15})
    raised = checks.raised(low, modelled())
    assert 0.8 * 4.2e12 < raised.bytes_per_s < 4.2e12 and 0.8 * 51e12 < raised.peaks["fp32"] < 51e12
    assert 0.8 * 763e12 < raised.peaks["bf16"] < 763e12
    assert checks.raised(high, modelled()) == high
    cached = peaks.Roofs("x", 1e12, {"fp32": 1e12}, 2**40)
    assert checks.raised(cached, modelled()).bytes_per_s == 1e12


# -- measured roofs


@pytest.fixture
def small(monkeypatch, one_thread):
    """A copy of 128 MiB: what is compared is compared at that size on both sides."""
    monkeypatch.setattr(peaks, "cpu_cache_bytes", lambda: 2**20)


def roof_result(**seconds):
    samples = {kind: [(r, [s * (1 + r / 100)]) for r in range(8)] for kind, s in seconds.items()}
    done = {kind: 2.0 * 2**30 if kind == "copy" else 2.0 * 8192**3 for kind in seconds}
    machine = {"cuda": "13.0", "gpus": ["NVIDIA H200"], "cores": 16, "cpu": "x", "driver": "1", "torch": "2"}
    names = list(peaks.KINDS)
    reasons = {k: f"prepare: no {k} here" for k in names if k not in seconds}
    result = Result("05.roofs", 1, "roof", names, {"time_s": samples}, reasons=reasons, work=done, machine=machine)
    return result


def test_a_roof_is_work_over_time():
    result = roof_result(copy=0.51e-3, bf16=1.44e-3)
    assert peaks.rate(result, "copy").lo == pytest.approx(2 * 2**30 / (0.51e-3 * 1.07), rel=0.03)
    assert peaks.rate(result, "bf16").hi == pytest.approx(2 * 8192**3 / 1.44e-3, rel=0.03)
    here = peaks.of(result)
    assert set(here.peaks) == {"bf16"} and here.name == "this machine" and here.cache_bytes is None
    assert here.ridge("bf16") == pytest.approx(here.peaks["bf16"] / here.bytes_per_s)
    with pytest.raises(PerflabError, match="no copy"):
        peaks.of(roof_result(bf16=1.44e-3))


def test_measured_stands_beside_printed_with_its_share_and_the_document():
    shown = peaks.Beside(roof_result(copy=0.51e-3, bf16=1.44e-3), gpus.sheet(["NVIDIA H200"]))
    assert 0.6 < shown.share("bf16") < 0.95 and 0.8 < shown.share("copy") < 1
    text = shown.html()
    assert "989.5 TFLOP/s" in text and "no fp8 here" in text and "datasheet" in text
    bare = peaks.Beside(roof_result(copy=1.0), gpus.sheet([]))
    assert repr(bare) == repr(shown) and math.isnan(bare.share("copy")) and "no GPU here" in bare.html()


def test_a_product_is_one_and_leaves_the_precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(PerflabError):
        peaks.multiplying("tf32", 64)()
    call = peaks.multiplying("fp32", 64)
    assert call() is None and torch.get_float32_matmul_precision() == before
    assert peaks.work("fp32") == 2 * peaks.side("fp32") ** 3 and peaks.work("copy") == 2 * peaks.copy_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the device's clock counts")
def test_calls_in_a_row_take_what_one_takes():
    assert 0.01 < peaks.in_a_row(lambda: time.sleep(0.01), 3) < 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device's own tests do this where there is one")
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
    drawn = []
    kept = roofline.style.figure
    monkeypatch.setattr(roofline.style, "figure", lambda *a, **k: drawn.append(kept(*a, **k)) or drawn[-1])
    lines = checks.lines(checks.checks(modelled(), H200))
    picture = roofline.picture(H200, lines, gpus.known()["H200"], [peaks.Roofs("other", 1e11, {"fp32": 1e12})])
    assert picture.data[:4] == b"\x89PNG" and "points of add, gelu" in picture.alt
    fig, ax = drawn[0]
    fig.draw_without_rendering()
    boxes = {t.get_text(): Text.get_window_extent(t) for t in ax.texts}  # without the lines to the points
    assert {"printed", "fp32", "matmul", "softmax", "other, fp32"} <= set(boxes)
    for (one, a), (two, b) in itertools.combinations(boxes.items(), 2):
        inner = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert inner[0] < 1 or inner[1] < 0.35 * min(a.height, b.height), (one, two)


def test_the_picture_needs_no_points_and_no_sheet():
    picture = roofline.picture(peaks.Roofs("this machine", 1e10, {"fp32": 1e11, "bf16": 1e9}))
    assert "points" not in picture.alt
    beside = roofline.picture(H200, beside=[peaks.Roofs("no fp32", 1e11, {"bf16": 1e12})])
    assert beside.data[:4] == b"\x89PNG"
    with pytest.raises(PerflabError, match="no arithmetic roof"):
        roofline.picture(peaks.Roofs("this machine", 1e10, {}))


def test_the_explorer_draws_at_choices_all_along_its_lists():
    explorer = roofline.explore_roofline(peaks.Roofs("this machine", 1e10, {"fp32": 1e11, "bf16": 1e9}, 2**25), 3e-6)
    for name, control in explorer.controls.items():
        first = control.value
        for value in [*control.options[::3], control.options[-1]]:
            control.value = value
            assert explorer.error is None, (name, value, explorer.error)
        control.value = first
    assert "nothing is timed here" in explorer.caption.value and "measured roofs" in explorer.caption.value
    explorer.controls["dtype"].value, explorer.controls["operator"].value = "fp8", "matmul"
    assert "No fp8 roof is measured for this machine" in explorer.caption.value
    explorer.controls["device"].value = "H200"
    assert "printed roofs" in explorer.caption.value


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


def test_the_calls_of_the_question_are_counted_as_they_run():
    for name in "ade":
        call = problems.CALLS[name]
        if name == "d":
            call = problems.RoofCall("matmul", 1, 64, 128)
        seen = work.counted(call.ready())
        said = call.work()
        assert (seen.bytes_read, seen.bytes_written) == (said.bytes_read, said.bytes_written), name
        assert seen.flops == said.flops, name


def truths(monkeypatch, **flat):
    """As measured on an H200 by the model; `flat` sets what twice the size does to a call."""
    times = {"copy": 0.51e-3, "fp32": 21.6e-3}
    here = peaks.Roofs("x", 2 * 2**30 / 0.51e-3, {"fp32": 2 * 8192**3 / 21.6e-3})
    for name, call in problems.CALLS.items():
        for label, c in ((name, call), (f"{name}, larger", call.larger())):
            times[label] = max(6e-6, roofline.place(c.work(), here, "fp32").bound_s)
    times |= {f"{name}, larger": times[name] * x for name, x in flat.items()}
    samples = {label: [(r, [t]) for r in range(6)] for label, t in times.items()}
    done = {"copy": 2.0 * 2**30, "fp32": 2.0 * 8192**3}
    result = Result("05.exercise", 1, "call", list(times), {"time_s": samples}, work=done)
    monkeypatch.setattr(problems, "_measured", lambda: result)


@pytest.mark.timed
def test_the_regimes_are_compared_with_what_the_machine_does(monkeypatch):
    q = question("05.1")
    right = eval(q.problem.solution)
    truths(monkeypatch)
    assert q.check(right).state == "Correct"
    for name, wrong in (("a", BANDWIDTH), ("b", ARITHMETIC), ("c", BANDWIDTH), ("d", ARITHMETIC), ("e", BANDWIDTH)):
        outcome = q.check(right | {name: wrong})
        assert outcome.state == "Not right" and outcome.sentence.startswith(f"{name} is not {wrong}")
    truths(monkeypatch, b=1.0)
    assert q.check(right).state == "CANNOT TELL" and "b:" in q.check(right).sentence
    for answer, word in [(7, "each letter"), ({"a": OVERHEAD}, "each letter"), (right | {"a": "fast"}, "not fast")]:
        assert q.check(answer).state == "Not right" and word in q.check(answer).sentence


@pytest.mark.timed
@pytest.mark.slow
def test_the_reference_answer_is_never_called_wrong_here(small, note):
    outcome = question("05.1").check(eval(question("05.1").problem.solution))
    note(f"05.1 here: {outcome}")
    assert outcome.state in ("Correct", "CANNOT TELL")


@pytest.mark.slow
def test_regimes_agree_with_twice_the_rows_on_this_machine(small, note):
    """The large and the small sizes of all five operators; a busy machine may leave a few marks to chance."""
    tensors = operators.Tensors()
    cases = {k: c for k, c in operators.grid().items() if c.size != "medium" and c.change != CHANGES[2]}

    def ready(case):
        return operators.prepared(case, tensors)

    seen = vary("operator", cases, lambda call: call(), prepare=ready, study="t.ops", budget_s=2)
    here = peaks.Roofs("this machine", 1e10, {"fp32": 1e11})
    wrong = []
    for name in OPERATORS:
        for size in ("small", "large"):
            twice = seen.ratio(OperatorCase(name, size, CHANGES[1]).label, OperatorCase(name, size).label)
            placed = roofline.place(OperatorCase(name, size).work("cpu"), here, "fp32", 2e-6)
            assert (placed.regime == OVERHEAD) == (size == "small")
            finding = twice.at_most(math.sqrt(2)) if size == "small" else twice.at_least(math.sqrt(2))
            wrong += [(name, size, str(twice))] * (finding.state == NOT)
    note(f"regimes refuted by twice the rows: {wrong or 'none'}")
    assert len(wrong) <= 1
