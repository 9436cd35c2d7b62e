"""What torch.compile sees of a function: its graphs, where it stops, which guard makes it compile anew.

Nothing here needs a compiler: graphs run operator by operator. Each look is of a copy of the function's
code, so that nothing that is compiled in this process is lost or found.
"""

import contextlib
import functools
import inspect
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from perflab.bench.code import Place, is_own, place
from perflab.errors import PerflabError

from .dispatch import check_callable

_LOUD = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._logging", "torch.fx")
_BREAKS_LOG = "torch._dynamo.symbolic_convert.__graph_breaks"
_BLACK_BOX = "the compiler cannot look into it"
# Words in torch's reason for a break, the operator as it is written (or the group `op` of the words), and the cause.
_WORDS = [
    (r"Tensor\.item\(\)|_local_scalar_dense|item\(", ".item()", "it reads a number from a tensor"),
    (r"generic_jump|[Dd]ata-dependent (branching|jump)", "if on a tensor", "which way to go depends on the data"),
    (r"tolist|to_list", ".tolist()", "it reads numbers from a tensor"),
    (r"builtin operator `print`", "print", "it writes to the screen, which no kernel can do"),
    (r"logging\.Logger", "logging", "it writes a log, which no kernel can do"),
    (r"requires_grad_\(\) intermediate", ".requires_grad_()", "a tensor made here asks for gradients"),
    (r"backward\(\)", ".backward()", "the backward pass is not compiled with the code around it"),
    (r"graph_break\(\)", "graph_break()", "it asks for one"),
    (r"Dynamic shape operator.*?`aten\.(?P<op>\w+)", "", "the size of its result depends on the data"),
    (r"builtin operator `(?P<op>[\w.]+)`", "", _BLACK_BOX),
    (r"builtin `(?:<unknown module>\.)?(?P<op>[\w.]+?)\.?`", "", _BLACK_BOX),
    (r"(?:qualname|method|function)[: `]+(?P<op>[\w.]+)", "", _BLACK_BOX),
]


@dataclass(frozen=True)
class Break:
    """A graph break: `operator` as it is written, the cause in plain words, and where."""

    operator: str
    cause: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operator} ({self.place}): {self.cause}"


@dataclass(frozen=True)
class Guard:
    """Why call number `call` (from 0) was compiled anew: what the guard looks at, its value before and now."""

    call: int
    what: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"call {self.call}: {self.what} was {self.before}" + (f", now it is {self.now}" if self.now else "")


@dataclass(frozen=True)
class Recompiles:
    """`how` says of each call "compiled", "reused" or "eager"; `failed` has the guard of each recompilation."""

    graphs: int
    how: tuple[str, ...]
    failed: tuple[Guard, ...]
    limit: int

    @property
    def eager(self) -> bool:
        """Does the last call run eager, because the limit of graphs for one function was reached?"""
        return self.how[-1] == "eager" and self.graphs >= self.limit

    def __str__(self) -> str:
        calls = len(self.how)
        lines = [f"{self.graphs} graph{'s' * (self.graphs != 1)} for {calls} call{'s' * (calls != 1)}"]
        lines += map(str, self.failed)
        if not self.graphs:
            lines.append("nothing of it is compiled: in its first call the compiler saw no operator")
        if self.eager:
            lines.append(f"the limit of {self.limit} graphs is reached: now running eager")
        return "\n".join(lines)


def breaks(call: Callable, *inputs) -> tuple[Break, ...]:
    """Where compiling `call(*inputs)` stops and goes on anew: operator, cause and place. Needs no compiler."""
    check_callable(call)
    with silenced() as found:
        torch.compile(fresh_code(call), backend=CountingBackend())(*inputs)
    return tuple(found)


def recompiles(call: Callable, inputs: Iterable, dynamic: bool | None = None) -> Recompiles:
    """Call `call(*inputs[0])`, `call(*inputs[1])`, ... compiled, and say when it was compiled anew and why.

    inputs: one tuple of inputs a call. dynamic: as of torch.compile; False gives each size a graph of its
    own. Graphs run operator by operator, so that no compiler is needed.
    """
    check_callable(call)
    rows = [row if isinstance(row, tuple | list) else (row,) for row in inputs]
    if not rows:
        raise PerflabError("recompiles needs a list with the inputs of at least one call: [(x,), (y,)].")
    from torch import _dynamo

    backend, guards, how, failed = CountingBackend(), [], [], []
    forget_sizes()
    with silenced():
        ready = _dynamo.optimize(backend, dynamic=dynamic, guard_fail_fn=guards.append)(fresh_code(call))
        for k, row in enumerate(rows):
            graphs, runs = backend.graphs, backend.runs
            guards.clear()
            ready(*row)
            if backend.graphs > graphs:
                how.append("compiled")
            else:
                how.append("reused" if backend.runs > runs else "eager")
            if guards and how[-1] != "reused":
                failed.append(_guard(k, [str(guard.reason) for guard in guards], call, row))
    return Recompiles(backend.graphs, tuple(how), tuple(failed), _dynamo.config.recompile_limit)


class CountingBackend:
    """A backend that counts graphs. It compiles with `compiler`, or else runs a graph operator by operator, as the
    backend "eager" does, and counts the runs."""

    def __init__(self, compiler: Callable | None = None):
        self.compiler = compiler
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.compiler(graph, inputs) if self.compiler else functools.partial(self._run, graph)

    def _run(self, graph, *inputs):
        self.runs += 1
        return graph.forward(*inputs)


class _BreaksLog(logging.Handler):
    """Reads breaks from the compiler's log; those before the first operator make no graph, and stand only there."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.breaks: list[Break] = []

    def emit(self, record):
        text = record.getMessage()
        match = re.search(r"Graph break in user code at (.+):(\d+)\s+Graph Break Reason: (.*)", text, re.DOTALL)
        if match is None:
            return
        lines = [*re.findall(r'File "(.+?)", line (\d+)', text), (match[1], match[2])]  # the innermost last
        own = [place(file, int(number)) for file, number in lines if is_own(file)] or [Place()]
        through_logging = any(file == logging.__file__ for file, _ in lines)
        if own[-1] not in [b.place for b in self.breaks]:
            self.breaks.append(Break(*_in_words("logging.Logger" if through_logging else match[3]), own[-1]))


def _in_words(reason: str) -> tuple[str, str]:
    """(operator, cause) of a break, from torch's own reason, which is kept where it is none of the known ones."""
    for pattern, operator, cause in _WORDS:
        if match := re.search(pattern, reason, re.DOTALL):
            return operator or match["op"].lstrip("_"), cause
    return "this line", (reason.strip().splitlines() or ["no reason given"])[0][:160]


@contextlib.contextmanager
def silenced() -> Iterator[list[Break]]:
    """No warning of the compiler reaches the notebook; the list fills with the breaks that it logs."""
    handler, log = _BreaksLog(), logging.getLogger(_BREAKS_LOG)
    with contextlib.suppress(ImportError, AttributeError):  # it would keep a break of an earlier look to itself
        from torch._dynamo.symbolic_convert import graph_break_dup_warning_checker

        graph_break_dup_warning_checker.reset()
    with contextlib.ExitStack() as put_back, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in [*map(logging.getLogger, _LOUD), log]:
            put_back.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        put_back.callback(setattr, log, "propagate", log.propagate)
        put_back.callback(log.removeHandler, handler)
        log.setLevel(logging.DEBUG)
        log.addHandler(handler)
        log.propagate = False
        yield handler.breaks


def fresh_code(call: Callable) -> Callable:
    """The same function with code of its own: what was compiled of a function is kept with its code."""
    if isinstance(call, types.FunctionType):
        copy = types.FunctionType(
            call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__
        )
        copy.__kwdefaults__, copy.__module__ = call.__kwdefaults__, call.__module__
        return copy

    def entry(*inputs):
        return call(*inputs)

    return fresh_code(entry)


def forget_sizes():
    """Sizes that changed in earlier calls of the same line would be taken as changing from the start."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.pgo import reset_code_state

        reset_code_state()


def _guard(k: int, reasons: list[str], call: Callable, inputs) -> Guard:
    """The guard of the newest graph, which was the last chance: "27/5: tensor 'x' size mismatch ..."."""
    numbered = [re.match(r"(?:\d+/(\d+):)?\s*([^\n]*)", reason.strip()).groups() for reason in reasons]
    text = max(numbered, key=lambda pair: int(pair[0] or -1))[1].split("  #")[0].strip()
    arguments = _arguments(call, inputs)
    if match := re.match(
        r"tensor '(.+?)' (\w+) mismatch(?: at index (\d+))?\. expected (?:\w+=)?(.+?)(?:, actual (.+))?$", text
    ):
        name, what, index, before, now = match.groups()
        where = f" at dimension {index}" if index else ""
        return Guard(k, f"{what} of {_written(name, call, arguments)}{where}", before, now or "")
    if match := re.match(r"(.+?) == (.+)$", text):
        name = _written(match[1], call, arguments)
        now = arguments.get(name)
        return Guard(k, name, match[2], repr(now) if isinstance(now, int | float | str | bool) else "")
    return Guard(k, "the condition", _written(text, call, arguments), "")


def _written(name: str, call: Callable, arguments: dict[str, object]) -> str:
    """L['x'] as x, and so is a global name; of a module (see `fresh_code`) its inputs and attributes by their names."""
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    if isinstance(call, types.FunctionType):
        return name
    for position, argument in enumerate(arguments):
        name = name.replace(f"inputs[{position}]", argument)
    return re.sub(r"\bcall\b", type(call).__name__, name)


def _arguments(call: Callable, inputs) -> dict[str, object]:
    """The inputs of a call by the names of its parameters; empty where it does not tell them."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(inspect.signature(getattr(call, "forward", call)).bind(*inputs).arguments)
    return {}
