"""An engine around another one: "like DDP, plus" in ten lines."""

from __future__ import annotations

import abc
from typing import Any

import torch
from typing_extensions import override

from accel_integrations.engines.engine import Engine
from accel_integrations.prepared.optimizer import AcceleratedOptimizer


class DelegatingEngine(Engine):
    """Asks another engine for everything that a subclass does not say itself.

    Prepared optimizers step through this engine. What the inner engine calls within its other methods stays its own.

    Args:
        inner (`Engine`): The other engine.

    Example:
        ```python
        class CountingEngine(DelegatingEngine):
            name = "counting"
            num_steps = 0

            def __init__(self, context):
                super().__init__(DDPEngine(context) if context.state.num_processes > 1 else SingleEngine(context))

            def step(self, optimizer, closure=None):
                self.num_steps += 1
                return self.inner.step(optimizer, closure)
        ```
    """

    def __init__(self, inner: Engine) -> None:
        # no call of super: precision and averaging are those of the inner engine
        self.inner = inner
        self.context = inner.context
        self.gradient_state = inner.gradient_state
        self.averaging = inner.averaging

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """As the inner engine does, except for steps, which are asked of this one."""
        prepared = self.inner.prepare_optimizer(optimizer, device_placement=device_placement)
        if prepared._take_step == self.inner.step:
            prepared.step_through(self.step, prepared._before_step)
        return prepared


def _method(name: str) -> Any:
    def ask_inner(self: DelegatingEngine, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    ask_inner.__name__, ask_inner.__doc__ = name, getattr(Engine, name).__doc__
    return ask_inner


def _attribute(name: str) -> Any:
    """A property of the inner engine; precision alone is set from outside."""

    def change(self: DelegatingEngine, value: Any) -> None:
        setattr(self.inner, name, value)

    return property(lambda self: getattr(self.inner, name), change)


def _complete(kind: Any) -> None:
    for name, value in vars(Engine).items():
        if not name.startswith("_") and name not in vars(kind) and name != "name":
            setattr(kind, name, _method(name) if callable(value) else _attribute(name))
    kind.precision = _attribute("precision")
    abc.update_abstractmethods(kind)


_complete(DelegatingEngine)
