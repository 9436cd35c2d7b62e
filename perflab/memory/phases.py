"""The phases of a training step, told by torch's own doors while a loop runs that knows nothing of it."""

import contextlib
from collections.abc import Callable

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer

FORWARD, BACKWARD, OPTIMIZER, REST = PHASES = "forward", "backward", "optimizer", "rest"


class Phases:
    """Where the loop is: `at` is (step, phase). `turn` is called before each change."""

    def __init__(self, turn: Callable[[], None] = lambda: None):
        self.step, self.inside, self.turn = 1, [FORWARD], turn

    def between(self, name: str):
        """The phase outside of all doors."""
        if self.inside[0] != name and len(self.inside) == 1:
            self.turn()
            self.inside[0] = name

    @property
    def at(self) -> tuple[int, str]:
        return self.step, self.inside[-1]

    @contextlib.contextmanager
    def phase(self, name: str):
        self.turn()
        self.inside.append(name)
        try:
            yield
        finally:
            self.turn()
            self.inside.pop()
            self.between(REST)

    @contextlib.contextmanager
    def watched(self):
        """torch's doors to backward and optimizer, watched while the steps run and then as they were."""
        doors = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        entered: list = []

        def through(door):
            def watched(*args, **kwargs):
                with self.phase(BACKWARD):
                    return door(*args, **kwargs)

            return watched

        def enters(*_):
            entered.append(self.phase(OPTIMIZER))
            entered[-1].__enter__()

        def leaves(*_):
            if entered:
                entered.pop().__exit__(None, None, None)

        hooks = [register_module_forward_pre_hook(lambda *_: self.between(FORWARD))]
        hooks.append(optimizer.register_optimizer_step_pre_hook(enters))
        hooks.append(optimizer.register_optimizer_step_post_hook(leaves))
        for name, door in doors.items():
            setattr(torch.autograd, name, through(door))
        try:
            yield self
        finally:
            for name, door in doors.items():
                setattr(torch.autograd, name, door)
            for hook in hooks:
                hook.remove()

    def run(self, step, steps: int):
        for self.step in range(1, steps + 1):
            step()
            self.turn()
            self.inside = [FORWARD]
