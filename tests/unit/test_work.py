"""Counted work against formulas from paper and pencil, and against torch's own count of the same thing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perflab import PerflabError
from perflab.roofline import flops
from perflab.roofline.work import counted

M, N, K = 64, 48, 80
X, Y, OUT = torch.randn(100), torch.randn(100), torch.empty(100)
SQUARE, TABLE, ROWS = torch.randn(16, 16), torch.randn(10_000, 16), torch.arange(5)
Z = torch.ones(4, 4, dtype=torch.complex64)


# -- FLOPs


def test_a_matrix_product_is_2mnk_and_moves_its_three_matrices():
    work = counted(torch.mm, torch.randn(M, K), torch.randn(K, N))
    assert work.flops == 2 * M * N * K
    assert (work.bytes_read, work.bytes_written) == (4 * (M * K + K * N), 4 * M * N)
    assert work.intensity == pytest.approx(2 * M * N * K / (4 * (M * K + K * N + M * N)))
    assert not work.unknown and work.calls == 1


def test_a_linear_layer_forward_and_backward_is_three_times_forward(each_device):
    layer = nn.Linear(K, N, bias=False, device=each_device)
    x, y = torch.randn(M, K, device=each_device, requires_grad=True), torch.randn(M, N, device=each_device)
    assert counted(lambda: layer(x).backward(y)).operators["aten.mm"].flops == 3 * 2 * M * N * K
    assert counted(layer, x.detach()).flops == 2 * M * N * K


def test_a_convolution_has_two_flops_for_each_weight_and_output():
    conv, x = nn.Conv2d(3, 16, 5, stride=2, padding=2), torch.randn(2, 3, 32, 32)
    assert counted(conv, x).flops == 2 * (2 * 16 * 16 * 16) * (3 * 5 * 5)


def encoder():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, 16, 64)


def convolutional():
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)), torch.randn(4, 3, 32, 32)


def test_an_encoder_layer_has_the_analytic_matrix_work():
    """Four projections, two products of attention, two of the feed-forward: 2,228,224 FLOP."""
    work = counted(*encoder())
    products = sum(work.operators[f"aten.{name}"].flops for name in ("mm", "addmm", "bmm"))
    assert products == 2 * 2 * 16 * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 2 * (2 * 16 * 16 * 64) == 2_228_224
    assert not work.unknown


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("make", [convolutional, encoder])
def test_a_training_step_has_no_operator_without_a_formula(make, optimizer, each_device):
    model, x = (part.to(each_device) for part in make())
    parameters = optimizer(model.parameters(), lr=0.01)

    def step():
        with torch.autocast(each_device, torch.bfloat16):
            logits = model(x).flatten(0, -2)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=each_device))
        loss.backward()
        parameters.step()
        parameters.zero_grad()

    step()
    work = counted(step)
    assert not work.unknown and work.flops > 0


def test_a_fused_path_without_a_formula_is_named_and_not_taken_for_nothing():
    layer, x = encoder()
    with torch.no_grad():
        work = counted(layer.eval(), x)
    assert any("_transformer_encoder_layer_fwd" in what for what in work.unknown)
    assert "not in the FLOPs: aten._transformer_encoder_layer_fwd, 1 call" in str(work)


def test_an_operator_without_a_formula_is_named_with_its_calls():
    assert counted(lambda x: x.sort()[0].sort()[0], X).unknown == ("aten.sort, 2 calls: no formula for it",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_counted_like_its_plain_form(dtype, each_device):
    """torch's own count of the plain form, which has a formula everywhere; 12,582,912 is not 0."""
    q, k, v = (torch.randn(2, 4, 64, 96, dtype=dtype, device=each_device, requires_grad=True) for _ in range(3))
    forward = 2 * (2 * 4 * 64 * 64 * 2) * 96

    def both():
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as plain:
        both()
    assert counted(F.scaled_dot_product_attention, q, k, v).flops == forward
    work = counted(both)
    fused = [o.flops for name, o in work.operators.items() if "attention" in name]
    assert len(fused) == 2 and not work.unknown
    # The fused backward calculates the scores again: five products, where the plain one needs four.
    assert sum(fused) == plain.get_total_flops() + forward // 2 == forward + forward * 5 // 2


@pytest.mark.parametrize(
    ("operator", "per_element"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x * x, 1),
        (torch.relu, 1),
        (lambda x: x / 3, 4),
        (torch.exp, 8),
        (lambda x: x**2, 1),
        (lambda x: x**1.7, 8),
        (F.gelu, 12),
        (lambda x: F.softmax(x, -1), 15),
        (lambda x: F.layer_norm(x, (32,)), 8),
        (lambda x: x.sum(), 1),
        (lambda x: x.clone().add_(1), 1),
        (lambda x: torch._foreach_add([x, x], 1), 2),
        (lambda x: x.to(torch.float64), 0),
        (lambda x: torch.cat([x, x]), 0),
    ],
)
def test_elementwise_operators_follow_the_stated_convention(operator, per_element):
    work = counted(operator, torch.rand(16, 32) + 0.5)
    assert work.flops == per_element * 16 * 32 and not work.unknown


@pytest.mark.parametrize("call", [lambda: Z * Z, lambda: Z @ Z])
def test_complex_numbers_are_not_said_to_cost_nothing(call):
    (said,) = counted(call).unknown
    assert "of complex numbers" in said


def test_every_name_of_the_table_is_an_operator_of_torch():
    names = {*flops.PER_ELEMENT, *flops.NO_ARITHMETIC}
    unknown = [n for n in names if not (hasattr(torch.ops.aten, n) or hasattr(torch.ops.aten, f"{n}_"))]
    assert not unknown
    assert not flops.NO_ARITHMETIC.intersection(flops.PER_ELEMENT)


# -- bytes

MOVED = {
    "what is made of views": (lambda: X.reshape(2, 50).t()[:25].detach() + 0, 200, 200),
    "the same tensor twice": (lambda: X + X, 400, 400),
    "two tensors": (lambda: X + Y, 800, 400),
    "a tensor and its transpose": (lambda: SQUARE @ SQUARE.t(), 1024, 1024),
    "in place": (lambda: OUT.add_(Y), 800, 400),
    "a copy": (lambda: OUT.copy_(Y), 400, 400),
    "a fill": (lambda: OUT.fill_(0), 0, 400),
    "out=": (lambda: torch.add(X, 1, out=OUT), 400, 400),
    "an expanded tensor": (lambda: X.expand(1000, 100) + 1, 400, 400_000),
    "every second column": (lambda: SQUARE[:, ::2] + 1, 512, 512),
    "91 windows of 10 over 100 numbers": (lambda: X.unfold(0, 10, 1) + 1, 400, 3640),
    "a lookup of 5 rows of 16": (lambda: F.embedding(ROWS, TABLE), 40 + 320, 320),
    "a new tensor of a shape": (lambda: torch.zeros_like(X), 0, 400),
    "memory alone": (lambda: torch.empty_like(X), 0, 0),
    "a chain, which moves each intermediate": (lambda: torch.relu((X + 1) * 2), 1200, 1200),
    "whole numbers": (lambda: ROWS * 3, 40, 40),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_are_those_of_what_is_read_and_of_what_is_written(name):
    call, read, written = MOVED[name]
    work = counted(call)
    assert (work.bytes_read, work.bytes_written) == (read, written) and not work.unknown


def test_views_are_no_operators_and_whole_numbers_no_flops():
    assert list(counted(MOVED["what is made of views"][0]).operators) == ["aten.add"]
    assert counted(MOVED["whole numbers"][0]).flops == 0


def test_an_optimizer_reads_and_writes_its_state():
    model, x = nn.Linear(64, 64, bias=False), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    work = counted(step)
    written = {name: o.bytes_written for name, o in work.operators.items() if name.endswith("_")}
    assert written == {"aten.mul_": 64 * 64 * 4, "aten.add_": 2 * 64 * 64 * 4}  # the momentum; both, the weight last


# -- the call


def test_a_model_without_memory_is_counted_the_same():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)), torch.randn(8, 32)
    assert counted(model, x) == counted(model.to("meta"), x.to("meta"))


def test_inference_mode_changes_nothing():
    model, x = nn.Linear(32, 64), torch.randn(8, 32)
    with torch.inference_mode():
        inside = counted(model, x)
    assert (inside.flops, inside.moved_bytes) == (counted(model, x).flops, counted(model, x).moved_bytes)


def test_the_parts_add_up_to_the_whole():
    layer, x = encoder()
    work = counted(lambda: layer(x).sum().backward())
    table = work.table()
    for column in ("calls", "flops", "bytes_read", "bytes_written"):
        assert table[column].sum() == getattr(work, column) > 0


def test_it_prints_itself_with_units():
    text = str(counted(torch.mm, torch.ones(1024, 1024), torch.ones(1024, 1024)))
    assert text == ("Work of 1 operator: 2.15 GFLOP, intensity 171 FLOP/byte\n  reads 8.00 MiB, writes 4.00 MiB")


def test_the_call_runs_once_and_an_error_is_its_own():
    calls = []
    counted(lambda x: calls.append(x + 1), X)
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        counted(lambda: 1 / 0)
    assert counted(torch.add, X, 1).calls == 1  # and no mode is left behind


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (lambda: 3, "no operator"),
        (torch.eye(3).to_sparse, "bytes of a sparse_coo tensor are not known"),
        (torch.eye(3).to_sparse_csr, "bytes of a sparse_csr tensor are not known"),
        (lambda: torch.nested.nested_tensor([X, Y]), "bytes of a nested tensor are not known"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_counted_is_one_sentence(made, word):
    thing = made()
    with pytest.raises(PerflabError, match=word):
        counted(lambda: thing * 2)


@pytest.mark.slow
def test_a_compiled_function_is_counted_as_it_was_written():
    """Counted inside a compiled graph it would be two kernels or one, and slow for ever after."""

    def chain(x):
        return x.sin() + 1

    compiled = torch.compile(chain, backend="eager")
    compiled(X)
    assert counted(compiled, X).operators.keys() == counted(chain, X).operators.keys() == {"aten.sin", "aten.add"}
