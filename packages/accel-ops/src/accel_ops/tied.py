"""Tied parameters: those that a model has under several names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel_ops.modules import walk

META = torch.device("meta")


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, parameters and names in the model's order; tied ones have several.

    Args:
        model: The model, which may be on the meta device.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in walk(model, repeat_shared=True):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{path}.{key}" if path else key)
    return names


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The names of tied parameters.

    Args:
        model: The model, which may be on the meta device.
        kwargs: Accepted for compatibility with accelerate 1.15, and not used.

    Returns:
        For each of these parameters its names, sorted; the parameters are in the model's order.

    Example:
        ```python
        find_tied_parameters(gpt2)  # [["lm_head.weight", "transformer.wte.weight"]]
        ```
    """
    return [sorted(names) for names in names_by_parameter(model).values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again after each name was loaded separately; those on different devices are not tied.

    Args:
        model: The model.
        tied_params: What `find_tied_parameters` gave.
    """
    for group in tied_params:
        found = {name: _find(model, name) for name in group}
        values = [parameter for parameter in found.values() if parameter is not None]
        if not values:
            continue
        kept = next((value for value in values if value.device.type != "meta"), values[0])
        for name, parameter in found.items():
            if parameter is not None and parameter is not kept and parameter.device in (kept.device, META):
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, kept)


def _find(model: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, last = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(last)
    except AttributeError:
        return None
