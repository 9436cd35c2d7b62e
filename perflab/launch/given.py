"""Inputs of the caller's own functions: can it be called with them, and may others take their place in a graph."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.utils._pytree import tree_flatten

from perflab.errors import PerflabError


def check(who: str, call: object, inputs: Sequence | None = None, options: Mapping = MappingProxyType({})):
    """Raises PerflabError, on behalf of the function `who`, unless `call(*inputs, **options)` can run.

    Without inputs, `who` is one that takes a step of a loop, and calls it as it is.
    """
    way = f"{who}(lambda: step(batch))" if inputs is None else f"{who}(model, x)"
    if isinstance(call, type):
        raise PerflabError(f"{who} needs a function or a model, and {call.__name__} is a class: {call.__name__}(...).")
    if not callable(call):
        raise PerflabError(f"{who} needs a function or a model, not {type(call).__name__}: {way}.")
    body = call.forward if isinstance(call, torch.nn.Module) else call
    if inspect.isgeneratorfunction(body) or inspect.iscoroutinefunction(body):
        raise PerflabError(
            f"{who} needs what runs when it is called, and not a generator or a coroutine: return, not yield."
        )
    with contextlib.suppress(ValueError):  # built-in functions do not tell their arguments
        signature = inspect.signature(body)
        try:
            signature.bind(*(inputs or ()), **options)
        except TypeError as e:
            count = f"{len(inputs)} input{'s' * (len(inputs) != 1)}" if inputs else "no input"
            raise PerflabError(f"{who} calls it with {count}: {e}; write {way}.") from None


def misfits(inputs: Sequence, others: Sequence, names: Sequence[str]) -> Iterator[str]:
    """In sentences, why a graph that is captured for `inputs`, called by `names`, cannot take `others`."""
    if len(inputs) != len(others):
        yield f"a graph for {len(inputs)} inputs cannot take {len(others)}"
        return
    for name, static, new in zip(names, inputs, others, strict=True):
        (old_parts, old_tree), (new_parts, new_tree) = tree_flatten(static), tree_flatten(new)
        if old_tree != new_tree:
            yield f"{name} is built otherwise than when it was captured: give it the same containers"
            continue
        yield from (f"{name} {why}" for a, b in zip(old_parts, new_parts, strict=True) if (why := _misfit(a, b)))


def _misfit(old, new) -> str:
    """Why a graph that was captured with `old` cannot take `new`, or ""."""
    if not torch.is_tensor(old):
        if torch.is_tensor(new) or old != new:
            return f"was {old!r} when it was captured and is {new!r}: a graph keeps what is no tensor; pass a tensor"
        return ""
    if not torch.is_tensor(new):
        return f"was a tensor when it was captured and is {type(new).__name__}"
    if old.shape != new.shape:
        return (
            f"has shape {tuple(new.shape)} and was captured with {tuple(old.shape)}: "
            "pad it, or capture one graph per shape"
        )
    if old.dtype != new.dtype:
        return f"is {new.dtype} and was captured as {old.dtype}: convert it before"
    if old.device != new.device:
        return f"is on {new.device} and was captured on {old.device}: move it before"
    return ""


def names_of(call: Callable, count: int) -> list[str]:
    """What the inputs of `call` are called in a sentence: "Input x"."""
    try:
        named = list(inspect.signature(getattr(call, "forward", call)).parameters.values())
    except (TypeError, ValueError):
        named = []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    words = [f"Input {p.name}" for p in named if p.kind in plain]
    return [words[k] if k < len(words) else f"Input {k}" for k in range(count)]
