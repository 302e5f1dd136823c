"""Methods that one model has and its class has not: such as those that a dispatched model gets.

They hold a weak reference to the model. A bound method or a closure among its attributes would be a reference cycle,
and a deleted model would keep its memory until the garbage collector runs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from typing_extensions import override

from accel_state.weak import Weak

MOVERS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu")


class ModelMethod:
    """A method of one model. A copy or a pickle of the model has its own.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = Weak(model)

    @property
    def model(self) -> nn.Module:
        """The model, while there is one."""
        return self._model.get()

    @property
    def replaced(self) -> Any:
        """What the model had under this name before, if it was no method of its class."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)


class GuardedMove(ModelMethod):
    """A method that moves a dispatched model: it warns first, or raises an error.

    Args:
        model: The model.
        name: The name of the method.
        offloaded: Whether weights of the model are offloaded, so that it cannot be moved.
        replaced: What the model had under this name, if it was no method of its class.
    """

    def __init__(self, model: nn.Module, name: str, offloaded: bool, replaced: Callable[..., Any] | None) -> None:
        super().__init__(model)
        self.name = name
        self.offloaded = offloaded
        self._replaced = replaced
        move = self._move()
        functools.update_wrapper(self, move)
        del self.__wrapped__  # type: ignore[attr-defined]  # it is bound to the model
        self.__signature__ = inspect.signature(move)

    @property
    @override
    def replaced(self) -> Any:
        """The function that the program had put there, if it had."""
        return self._replaced

    def _move(self) -> Callable[..., Any]:
        move: Callable[..., Any] = getattr(type(self.model), self.name).__get__(self.model)
        return self._replaced if self._replaced is not None else move

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Warn, and move the model if that is possible."""
        model = self.model
        logging.getLogger("accelerate.big_modeling").warning(
            "%s is dispatched over devices, and moving it puts its weights where its hooks do not expect them.",
            type(model).__name__,
        )
        if self.offloaded and any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError(
                f"{type(model).__name__} has weights offloaded to CPU memory or disk and cannot be moved: use "
                "another device map, or remove its hooks first (remove_hook_from_submodules)."
            )
        return self._move()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model, self.name, self.offloaded, self._replaced)


def warn_when_moved(model: nn.Module, offloaded: bool) -> None:
    """Let the methods that move a dispatched model warn, or raise an error.

    Args:
        model: The model.
        offloaded: Whether weights of it are offloaded.
    """
    for name in MOVERS:
        if hasattr(model, name):
            replaced = model.__dict__.get(name)
            if isinstance(replaced, GuardedMove):  # it was dispatched before
                replaced = replaced.replaced
            setattr(model, name, GuardedMove(model, name, offloaded, replaced))


def remove_methods(model: nn.Module) -> None:
    """Take from a model the methods of this module; what they replaced comes back."""
    for name, method in list(model.__dict__.items()):
        if isinstance(method, ModelMethod):
            if method.replaced is None:
                delattr(model, name)
            else:
                setattr(model, name, method.replaced)
