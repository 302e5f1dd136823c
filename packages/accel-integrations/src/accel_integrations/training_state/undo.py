"""An undo log for loading states: when one object raises, all others get their earlier states back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from accel_ops.random import capture_rng_state, restore_rng_state


class Undo:
    """The undo log of a load, rolled back newest first.

    A copy of an object's state dict is kept before it changes, its tensors in CPU memory. torch's own optimizers replace
    their state when they load and never change it in place, so theirs is kept without a copy.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def roll_back(self) -> None:
        """Restore every object; errors of single ones are suppressed."""
        while self._steps:
            with suppress(Exception):
                self._steps.pop()()

    def keep(self, obj: Any) -> None:
        """Keep the state of an object with `state_dict()` and `load_state_dict()`."""
        attributes = dict(vars(obj)) if hasattr(obj, "__dict__") else {}
        try:
            state = _detached(obj.state_dict())
        except Exception:  # it has none yet
            state = None

        def restore() -> None:
            try:
                if state is None:
                    raise TypeError
                obj.load_state_dict(state)
            except Exception:
                vars(obj).update(attributes)

        self._steps.append(restore)

    def keep_optimizer(self, optimizer: Any) -> None:
        """Keep the state of an optimizer without wrappers."""
        if getattr(type(optimizer), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
            self.keep(optimizer)
            return
        state, groups = optimizer.state, optimizer.param_groups
        before = {"state": state.copy(), "param_groups": [dict(group) for group in groups]}

        def restore() -> None:
            state.clear()
            state.update(before["state"])
            for group, values in zip(groups, before["param_groups"], strict=True):
                group.clear()
                group.update(values)
            optimizer.state, optimizer.param_groups = state, groups

        self._steps.append(restore)

    def keep_attributes(self, *objects: Any) -> None:
        """Keep the attributes of objects, without copies of their values."""
        before = [(obj, dict(vars(obj))) for obj in objects if hasattr(obj, "__dict__")]

        def restore() -> None:
            for obj, attributes in before:
                vars(obj).clear()
                vars(obj).update(attributes)

        self._steps.append(restore)

    def add(self, restore: Callable[[], object]) -> None:
        """Add a step of the program's: it restores an earlier state."""
        self._steps.append(restore)

    def keep_random_states(self) -> None:
        """Keep the RNG states of this process."""
        states = capture_rng_state()
        self._steps.append(lambda: restore_rng_state(states))

    def keep_values(self, model: nn.Module) -> None:
        """Keep copies of a model's parameters and buffers in CPU memory."""
        backups: list[tuple[Any, str, torch.Tensor, torch.Tensor]] = [
            (tensors, name, tensor, tensor.detach().to("cpu", copy=True))
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

        @torch.no_grad()
        def restore() -> None:
            for tensors, name, tensor, values in backups:
                tensors[name] = tensor
                if tensor.shape == values.shape:
                    tensor.copy_(values)
                else:
                    tensor.data = values.to(tensor.device)

        self._steps.append(restore)


def _detached(value: Any) -> Any:
    """A copy of a nested state, detached, with its tensors in CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple, set):
        return type(value)(map(_detached, value))
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _detached(inner) for key, inner in value.items()}
    return copy.deepcopy(value)
