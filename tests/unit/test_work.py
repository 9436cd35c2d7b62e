"""Counted work against formulas from paper and pencil, and against torch's own count of the same thing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perflab import PerflabError
from perflab.roofline import flops
from perflab.roofline.work import counted, distinct_bytes

M, N, K = 64, 48, 80


def bytes_of(*numels, each=4):
    return sum(numels) * each


# -- FLOPs


def test_a_matrix_product_is_2mnk_and_moves_its_three_matrices():
    work = counted(torch.mm, torch.randn(M, K), torch.randn(K, N))
    assert work.flops == 2 * M * N * K
    assert (work.bytes_read, work.bytes_written) == (bytes_of(M * K, K * N), bytes_of(M * N))
    assert work.intensity == pytest.approx(2 * M * N * K / (4 * (M * K + K * N + M * N)))
    assert not work.unknown and work.calls == 1


def test_a_linear_layer_forward_and_backward_is_three_times_forward():
    layer, x = nn.Linear(K, N, bias=False), torch.randn(M, K, requires_grad=True)
    y = torch.randn(M, N)
    step = counted(lambda: layer(x).backward(y))
    assert step.operators["aten.mm"].flops == 3 * 2 * M * N * K
    assert counted(layer, x.detach()).flops == 2 * M * N * K


def test_a_convolution_has_two_flops_for_each_weight_and_output():
    conv, x = nn.Conv2d(3, 16, 5, stride=2, padding=2), torch.randn(2, 3, 32, 32)
    assert counted(conv, x).flops == 2 * (2 * 16 * 16 * 16) * (3 * 5 * 5)


def test_an_encoder_layer_has_the_analytic_matrix_work():
    """Four projections, two products of attention, two of the feed-forward: 2,228,224 FLOP."""
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, 16, 64)
    work = counted(layer, x)
    products = sum(work.operators[f"aten.{name}"].flops for name in ("mm", "addmm", "bmm"))
    assert products == 2 * 2 * 16 * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 2 * (2 * 16 * 16 * 64) == 2_228_224
    assert not work.unknown


def test_a_fused_path_without_a_formula_is_named_and_not_taken_for_nothing():
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), torch.randn(2, 16, 64)
    with torch.no_grad():
        work = counted(layer, x)
    assert any("_transformer_encoder_layer_fwd" in what for what in work.unknown)
    assert "not in the FLOPs: aten._transformer_encoder_layer_fwd, 1 call" in str(work)


def test_an_operator_without_a_formula_is_named_with_its_calls():
    assert counted(lambda x: x.sort()[0].sort()[0], torch.randn(9)).unknown == (
        "aten.sort, 2 calls: no formula for it",
    )


@pytest.mark.parametrize("backward", [False, True])
def test_attention_on_cpu_is_counted_like_its_plain_form(backward):
    """torch's own count of the plain form, which has a formula everywhere; 12,582,912 is not 0."""
    q, k, v = (torch.randn(2, 4, 64, 96, requires_grad=True) for _ in range(3))

    def attention():
        out = F.scaled_dot_product_attention(q, k, v)
        if backward:
            out.sum().backward()

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as plain:
        attention()
    work = counted(attention)
    fused = [o for name, o in work.operators.items() if "attention" in name]
    assert len(fused) == 1 + backward and not work.unknown
    forward = 2 * (2 * 4 * 64 * 64 * 2) * 96
    assert fused[0].flops == forward
    # The fused backward calculates the scores again: five products, where the plain one needs four.
    assert sum(o.flops for o in fused) == plain.get_total_flops() + backward * forward // 2


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


def test_integers_do_no_floating_point_work():
    work = counted(lambda x: x * 3 + 1, torch.arange(100))
    assert work.flops == 0 and work.bytes_read == 2 * 800 and not work.unknown


# -- bytes


def test_views_move_nothing():
    work = counted(lambda x: x.reshape(8, 8, 16).transpose(0, 1)[2:].detach() + 0, torch.randn(64, 16))
    assert list(work.operators) == ["aten.add"]


def test_the_same_tensor_twice_is_read_once():
    x = torch.randn(100)
    assert counted(lambda x: x + x, x).bytes_read == 400
    assert counted(lambda x, y: x + y, x, x.clone()).bytes_read == 800
    square = torch.randn(16, 16)
    assert counted(lambda x: x @ x.t(), square).bytes_read == square.nbytes


def test_in_place_writes_where_it_reads():
    x, y = torch.randn(100), torch.randn(100)
    work = counted(lambda: x.add_(y))
    assert (work.bytes_read, work.bytes_written) == (800, 400)
    copied = counted(lambda: x.copy_(y))
    assert (copied.bytes_read, copied.bytes_written) == (400, 400)
    filled = counted(lambda: x.fill_(0))
    assert (filled.bytes_read, filled.bytes_written) == (0, 400)


def test_out_is_written_and_not_read():
    x, out = torch.randn(100), torch.empty(100)
    work = counted(lambda: torch.add(x, 1, out=out))
    assert (work.bytes_read, work.bytes_written) == (400, 400)


def test_an_expanded_tensor_counts_the_bytes_it_has():
    x = torch.randn(10)
    work = counted(lambda x: x.expand(1000, 10) + 1, x)
    assert (work.bytes_read, work.bytes_written) == (40, 40_000)
    assert distinct_bytes(torch.randn(8, 8)[:, ::2]) == 8 * 4 * 4
    windows = torch.randn(100).unfold(0, 10, 1)  # 91 windows of 10 over 100 numbers
    assert windows.numel() == 910 and distinct_bytes(windows) == 400


def test_a_lookup_reads_the_rows_it_picks():
    table = nn.Embedding(10_000, 16)
    work = counted(table, torch.arange(5))
    assert work.bytes_read == 5 * 8 + 5 * 64 and work.bytes_written == 5 * 64


def test_a_new_tensor_of_a_shape_reads_nothing():
    work = counted(torch.zeros_like, torch.randn(100))
    assert (work.bytes_read, work.bytes_written) == (0, 400)
    assert counted(torch.empty_like, torch.randn(100)).moved_bytes == 0


def test_a_chain_moves_each_intermediate():
    assert counted(lambda x: ((x + 1) * 2).relu(), torch.randn(1000)).moved_bytes == 6 * 4000


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
    assert not work.unknown


# -- the call


def test_a_model_without_memory_is_counted_the_same():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)), torch.randn(8, 32)
    real, meta = counted(model, x), counted(model.to("meta"), x.to("meta"))
    assert (real.flops, real.bytes_read, real.bytes_written) == (meta.flops, meta.bytes_read, meta.bytes_written)


def test_inference_mode_changes_nothing():
    model, x = nn.Linear(32, 64), torch.randn(8, 32)
    with torch.inference_mode():
        inside = counted(model, x)
    assert (inside.flops, inside.moved_bytes) == (counted(model, x).flops, counted(model, x).moved_bytes)


def test_the_parts_add_up_to_the_whole():
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, 16, 64)
    work = counted(lambda: layer(x).sum().backward())
    table = work.table()
    for column in ("calls", "flops", "bytes_read", "bytes_written"):
        assert table[column].sum() == getattr(work, column) > 0


def test_it_prints_itself_with_units():
    text = str(counted(torch.mm, torch.ones(1024, 1024), torch.ones(1024, 1024)))
    assert text == ("Work of 1 operator: 2.15 GFLOP, intensity 171 FLOP/byte\n  reads 8.00 MiB, writes 4.00 MiB")


def test_the_call_runs_once_and_an_error_is_its_own():
    calls = []

    def call(x):
        calls.append(x)
        return x + 1

    counted(call, torch.ones(1))
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        counted(lambda: 1 / 0)
    assert counted(torch.add, torch.ones(1), 1).calls == 1  # and no mode is left behind


def as_nested(x):
    return torch.nested.nested_tensor(list(x))


def test_what_runs_no_operator_cannot_be_counted():
    with pytest.raises(PerflabError, match="no operator"):
        counted(lambda: 3)


@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, as_nested])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_dense_are_one_sentence(made):
    with pytest.raises(PerflabError, match=r"bytes of a (sparse_\w+|nested) tensor are not known"):
        counted(lambda x: x * 2, made(torch.eye(3)))


def test_complex_numbers_are_not_said_to_cost_nothing():
    z = torch.ones(4, 4, dtype=torch.complex64)
    for call in (lambda: z * z, lambda: z @ z):
        (said,) = counted(call).unknown
        assert "of complex numbers" in said


@pytest.mark.slow
def test_a_compiled_function_is_counted_as_it_was_written():
    """Counted inside a compiled graph it would be two kernels or one, and slow for ever after."""

    def chain(x):
        return x.sin() + 1

    compiled, x = torch.compile(chain, backend="eager"), torch.randn(64)
    compiled(x)
    assert counted(compiled, x).operators.keys() == counted(chain, x).operators.keys() == {"aten.sin", "aten.add"}


def test_every_name_of_the_table_is_an_operator_of_torch():
    names = {*flops.PER_ELEMENT, *flops.NO_ARITHMETIC}
    unknown = [n for n in names if not (hasattr(torch.ops.aten, n) or hasattr(torch.ops.aten, f"{n}_"))]
    assert not unknown
    assert not flops.NO_ARITHMETIC.intersection(flops.PER_ELEMENT)
