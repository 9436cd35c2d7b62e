"""How many floating-point operations an operator does on each element: the convention that `work` counts by.

The convention is that of the Livermore loops (McMahon 1986, UCRL-53745, as quoted by Hennessy and Patterson):
add, subtract, multiply and compare count 1, divide and square root 4, exponential and other functions of the
maths library 8. It weighs what an operator asks for, not what a chip does: a GPU may do several in one
instruction. Matrix products and convolutions are not here: torch's own formulas count them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

BASIC, DIVIDE, FUNCTION = 1, 4, 8
_ERF = FUNCTION + 3 * BASIC  # (1 + erf(x / sqrt 2)) / 2: two products and a sum beside the function
_SIGMOID = 2 * BASIC + FUNCTION + DIVIDE  # 1 / (1 + exp(-x))


def _same(flops: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), flops)


# Per element of the operator's largest tensor: the output of what broadcasts, the input of what reduces.
PER_ELEMENT = {
    **_same(BASIC, "add sub rsub mul neg abs sign relu hardtanh clamp clamp_min clamp_max maximum minimum"),
    **_same(BASIC, "eq ne lt le gt ge sum mean amax amin max min argmax argmin cumsum prod round floor ceil"),
    **_same(BASIC, "threshold_backward hardtanh_backward isnan isinf max_pool2d_with_indices_backward"),
    **_same(BASIC, "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool2d_backward embedding_dense_backward"),
    **_same(DIVIDE, "div true_divide reciprocal sqrt remainder fmod"),
    **_same(FUNCTION, "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf erfc atan2"),
    "rsqrt": 2 * DIVIDE,  # a square root and a division
    "leaky_relu": 2 * BASIC,  # compare, multiply
    "sigmoid": _SIGMOID,
    "silu": _SIGMOID,  # x / (1 + exp(-x)): the same count
    "silu_backward": _SIGMOID + 5 * BASIC,  # g * s * (1 + x * (1 - s))
    "sigmoid_backward": 3 * BASIC,  # g * s * (1 - s)
    "tanh_backward": 3 * BASIC,  # g * (1 - y * y)
    "gelu_backward": _ERF + FUNCTION + 6 * BASIC,  # g * (cdf + x * pdf), pdf = c * exp(-x * x / 2)
    "softplus": 2 * FUNCTION + 2 * BASIC,  # log(1 + exp(x)), compared with a threshold
    "lerp": 3 * BASIC,  # a + w * (b - a)
    "addcmul": 3 * BASIC,  # a + c * x * y
    "addcdiv": 2 * BASIC + DIVIDE,  # a + c * x / y
    "_softmax": 3 * BASIC + FUNCTION + DIVIDE,  # maximum, subtract, exp, sum, divide
    "_safe_softmax": 3 * BASIC + FUNCTION + DIVIDE,
    "_log_softmax": 4 * BASIC + FUNCTION,  # maximum, subtract, exp, sum, subtract; one log a row is left out
    "_softmax_backward_data": 4 * BASIC,  # y * (g - sum(g * y))
    "_log_softmax_backward_data": 3 * BASIC + FUNCTION,  # g - exp(y) * sum(g)
    "native_layer_norm": 8 * BASIC,  # mean 1, variance 3, subtract and scale 2, weight and bias 2
    "native_layer_norm_backward": 14 * BASIC,  # x hat 2, of weight 2, of bias 1, g * w 1, two sums 3, of x 5
    "native_group_norm": 8 * BASIC,
    "native_group_norm_backward": 14 * BASIC,
    **_same(8 * BASIC, "native_batch_norm cudnn_batch_norm _native_batch_norm_legit miopen_batch_norm"),
    **_same(8 * BASIC, "_batch_norm_with_update"),
    **_same(4 * BASIC, "_native_batch_norm_legit_no_training _batch_norm_no_update"),  # subtract, scale, weight, bias
    **_same(14 * BASIC, "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward"),
    "_fused_rms_norm": 4 * BASIC,  # square and sum 2, scale 1, weight 1
    "_fused_rms_norm_backward": 9 * BASIC,  # x hat 1, of weight 2, g * w 1, sum 2, of x 3
    **_same(3 * BASIC + BASIC, "var std var_mean"),  # mean 1, subtract, square and sum 3
    **_same(2 * BASIC, "linalg_vector_norm norm mse_loss dot native_dropout"),  # two steps an element
    "mse_loss_backward": 3 * BASIC,  # 2 / n * g * (x - y)
    "native_dropout_backward": 2 * BASIC,  # mask, scale; random numbers are integer work and count nothing
    "_fused_adamw_": 9 * BASIC + 3 * DIVIDE + 2 * BASIC,  # moments 3 + 4, root, bias, divide; step 2, eps 1, decay 1
    "_fused_adam_": 9 * BASIC + 3 * DIVIDE + 2 * BASIC,
    "_fused_sgd_": 4 * BASIC,  # momentum 2, step 2
}

# Operators that move or make numbers and calculate none; random numbers are integer work.
NO_ARITHMETIC = _same(
    0,
    "_to_copy copy clone contiguous fill zero zeros zeros_like new_zeros ones ones_like new_ones full full_like "
    "new_full scalar_tensor arange linspace eye empty empty_like empty_strided new_empty new_empty_strided "
    "cat stack index index_select index_put _unsafe_index gather scatter embedding where masked_fill select_backward "
    "slice_backward constant_pad_nd roll flip repeat tril triu one_hot slice_scatter select_scatter "
    "normal uniform bernoulli random randperm randint rand randn rand_like randn_like exponential "
    "lift_fresh lift_fresh_copy _local_scalar_dense resize set detach alias nonzero logical_not logical_and "
    "logical_or bitwise_not bitwise_and bitwise_or isfinite equal item _pin_memory is_pinned record_stream "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",  # one number a row
)


def base_name(packet_name: str) -> str:
    """ "aten._foreach_add_" as "add": the entry that in-place and list variants share."""
    name = packet_name.rpartition(".")[2]
    if name in PER_ELEMENT:
        return name
    name = name.removeprefix("_foreach_")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def floating(tensors: Iterable[torch.Tensor]) -> bool:
    return any(t.is_floating_point() for t in tensors)


def elements(arguments: Iterable[object]) -> int:
    """Elements of the largest floating argument; a list of tensors counts as one."""
    sizes = [0]
    for a in arguments:
        group = [a] if isinstance(a, torch.Tensor) else a if isinstance(a, list | tuple) else []
        sizes.append(sum(t.numel() for t in group if isinstance(t, torch.Tensor) and t.is_floating_point()))
    return max(sizes)


def flops_of(packet_name: str, args: Sequence, kwargs: Mapping, outputs: Sequence[torch.Tensor]) -> int | None:
    """FLOPs of one operator by the table above; None where it has no entry there."""
    name = base_name(packet_name)
    if name in NO_ARITHMETIC:
        return 0
    if name == "pow":
        power = args[1] if len(args) > 1 else None
        each = {1: 0, 2: BASIC, 3: 2 * BASIC, 0.5: DIVIDE, -0.5: 2 * DIVIDE, -1: DIVIDE}
        per = each.get(power, FUNCTION) if isinstance(power, int | float) else FUNCTION
    elif name in ("gelu", "gelu_backward") and kwargs.get("approximate") == "tanh":
        per = FUNCTION + 8 * BASIC if name == "gelu" else FUNCTION + 17 * BASIC  # x/2 (1 + tanh(c (x + d x**3)))
    elif name == "gelu":
        per = _ERF + BASIC
    elif name in ("max_pool2d_with_indices", "avg_pool2d"):  # a comparison or a sum for each of the window
        window = [int(k) for k in args[1]]
        return outputs[0].numel() * math.prod(window if len(window) > 1 else window * 2)
    elif name in PER_ELEMENT:
        per = PER_ELEMENT[name]
    else:
        return None
    return per * elements([*args, *kwargs.values(), *outputs])
