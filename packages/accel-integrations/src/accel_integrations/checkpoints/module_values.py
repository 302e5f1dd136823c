"""Checking that the weights of a checkpoint fit a module, before the module changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_ops.modules import customizes_loading
from accel_ops.tied import find_shared_names


def check_values(model: nn.Module, values: Mapping[str, Any], problem: str, strict: bool) -> None:
    """Check that weights fit a module; one that customizes loading is not checked.

    Args:
        model: The module, without wrappers.
        values: The weights by name.
        problem: The beginning of the error message.
        strict: Whether names must be the same on both sides.

    Raises:
        ValueError: Weights are missing, unexpected, or of other shapes.
    """
    if loads_itself(model):
        return
    state_dict = model.state_dict()
    shapes = [
        f"{name!r} is {_shape_of(values[name])}, the model has {tuple(state_dict[name].shape)}"
        for name in state_dict
        if isinstance(state_dict[name], torch.Tensor)
        and name in values
        and getattr(values[name], "shape", None) != state_dict[name].shape
    ]
    missing = [f"{name!r} is missing" for name in state_dict if name not in values] if strict else []
    surplus = [f"{name!r} is not in the model" for name in values if name not in state_dict] if strict else []
    if problems := [*shapes, *missing, *surplus]:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"{problem} ({type(model).__name__}): {'; '.join(problems[:3])}{more}. Build the same model as when it was "
            "saved" + (", or pass strict=False." if not shapes else ".")
        )


def _shape_of(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else tuple(shape)


def complete_ties(own: Mapping[str, Any], weights: dict[str, Any]) -> None:
    """Add the names of tied weights under which they were not saved.

    Args:
        own: The state dict of the model to load into, which shows what is tied.
        weights: Changed in place.
    """
    for names in find_shared_names(own):
        saved = next((name for name in names if name in weights), None)
        if saved is not None:
            for name in names:
                weights.setdefault(name, weights[saved])


def loads_itself(model: nn.Module) -> bool:
    """Whether a module customizes loading, so that only it knows which names and shapes it takes."""
    keeps_extra_state = any(type(one).set_extra_state is not nn.Module.set_extra_state for one in model.modules())
    return keeps_extra_state or customizes_loading(model)
