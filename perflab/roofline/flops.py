"""How many floating-point operations an operator does on each element: the convention that `work` counts by.

The convention is that of the Livermore loops (McMahon 1986, UCRL-53745, as quoted by Hennessy and Patterson):
add, subtract, multiply and compare count 1, divide and square root 4, exponential and other functions of the
maths library 8. It weighs what an operator asks for, not what a chip does: a GPU may do several in one
instruction. Matrix products and convolutions are not here: torch's own formulas count them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

BASIC, DIVIDE, FUNCTION = 1, 4, 8

# FLOPs, and the operators that do as many per element of their largest tensor: the output of what broadcasts, the
# input of what reduces. What is one number a row, such as the log of a log_softmax, is left out.
_GROUPS = [
    (BASIC, "add sub rsub mul neg abs sign relu hardtanh clamp clamp_min clamp_max maximum minimum"),
    (BASIC, "eq ne lt le gt ge sum mean amax amin max min argmax argmin cumsum prod round floor ceil"),
    (BASIC, "threshold_backward hardtanh_backward isnan isinf max_pool2d_with_indices_backward"),
    (BASIC, "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool2d_backward embedding_dense_backward"),
    (2 * BASIC, "leaky_relu linalg_vector_norm norm mse_loss dot native_dropout native_dropout_backward"),
    (3 * BASIC, "sigmoid_backward tanh_backward mse_loss_backward lerp addcmul"),
    (4 * BASIC, "var std var_mean _softmax_backward_data _fused_rms_norm _fused_sgd_"),
    (4 * BASIC, "_native_batch_norm_legit_no_training _batch_norm_no_update"),
    (8 * BASIC, "native_layer_norm native_group_norm"),  # mean 1, variance 3, subtract and scale 2, weight and bias 2
    (8 * BASIC, "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"),
    (8 * BASIC, "_batch_norm_with_update"),
    (9 * BASIC, "_fused_rms_norm_backward"),
    (14 * BASIC, "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"),
    (14 * BASIC, "cudnn_batch_norm_backward batch_norm_backward"),
    (DIVIDE, "div true_divide reciprocal sqrt remainder fmod"),
    (DIVIDE + 2 * BASIC, "addcdiv"),
    (2 * DIVIDE, "rsqrt"),
    (FUNCTION, "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf erfc atan2"),
    (FUNCTION + 3 * BASIC, "_log_softmax_backward_data"),
    (FUNCTION + 4 * BASIC, "_log_softmax gelu"),  # gelu: x * (1 + erf(x / sqrt 2)) / 2
    (FUNCTION + 2 * BASIC + DIVIDE, "sigmoid silu"),  # x / (1 + exp(-x))
    (FUNCTION + 3 * BASIC + DIVIDE, "_softmax _safe_softmax"),  # maximum, subtract, exp, sum, divide
    (FUNCTION + 7 * BASIC + DIVIDE, "silu_backward"),
    (2 * FUNCTION + 2 * BASIC, "softplus"),
    (2 * FUNCTION + 9 * BASIC, "gelu_backward"),
    (11 * BASIC + 3 * DIVIDE, "_fused_adamw_ _fused_adam_"),
]
PER_ELEMENT = {name: each for each, names in _GROUPS for name in names.split()}
_TANH_FORM = {"gelu": FUNCTION + 8 * BASIC, "gelu_backward": FUNCTION + 17 * BASIC}  # approximate="tanh"
_POWERS = {1: 0, 2: BASIC, 3: 2 * BASIC, 0.5: DIVIDE, -0.5: 2 * DIVIDE, -1: DIVIDE}

# Operators that move or make numbers and calculate none; random numbers are integer work.
_MOVES = """
_to_copy copy clone contiguous fill zero zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full
scalar_tensor arange linspace eye empty empty_like empty_strided new_empty new_empty_strided cat stack index
index_select index_put _unsafe_index gather scatter embedding where masked_fill select_backward slice_backward
constant_pad_nd roll flip repeat tril triu one_hot slice_scatter select_scatter normal uniform bernoulli random
randperm randint rand randn rand_like randn_like exponential lift_fresh lift_fresh_copy _local_scalar_dense resize
set detach alias nonzero logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or isfinite equal item
_pin_memory is_pinned record_stream nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
"""
NO_ARITHMETIC = frozenset(_MOVES.split())


def base_name(packet_name: str) -> str:
    """ "aten._foreach_add_" as "add": the entry that in-place and list variants share."""
    name = packet_name.rpartition(".")[2]
    if name in PER_ELEMENT:
        return name
    name = name.removeprefix("_foreach_")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def elements(arguments: Iterable[object]) -> int:
    """Elements of the largest floating argument; a list of tensors counts as one."""
    groups = ([t for t in tree_leaves(a) if isinstance(t, torch.Tensor) and t.is_floating_point()] for a in arguments)
    return max((sum(t.numel() for t in group) for group in groups), default=0)


def flops_of(packet_name: str, args: Sequence, kwargs: Mapping, outputs: Sequence[torch.Tensor]) -> int | None:
    """FLOPs of one operator by the table above; None where it has no entry there."""
    name = base_name(packet_name)
    if name in NO_ARITHMETIC:
        return 0
    if name in ("max_pool2d_with_indices", "avg_pool2d"):  # a comparison or a sum for each of the window
        window = [int(k) for k in args[1]]
        return outputs[0].numel() * math.prod(window if len(window) > 1 else window * 2)
    each = PER_ELEMENT.get(name)
    if name == "pow":
        power = args[1] if len(args) > 1 and isinstance(args[1], int | float) else None
        each = _POWERS.get(power, FUNCTION)
    elif kwargs.get("approximate") == "tanh":
        each = _TANH_FORM.get(name, each)
    return None if each is None else each * elements([*args, *kwargs.values(), *outputs])
