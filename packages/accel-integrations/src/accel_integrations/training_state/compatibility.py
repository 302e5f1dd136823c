"""Whether saved states fit the models and optimizers of this run: names, shapes, hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import nn

from accel_ops.modules import customizes_loading
from accel_ops.tied import find_shared_names

STATE_OF_A_PARAMETER = {
    torch.optim.Adam: {"exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq"},
    torch.optim.NAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.RAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.Adamax: {"exp_avg", "exp_inf"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.RMSprop: {"square_avg"},
}
"""The state tensors, of the parameter's shape, that each optimizer needs after its first step."""


def check_optimizer(
    optimizer: Any,
    state: dict[str, Any],
    where: str,
    own_state: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Check that a state fits an optimizer.

    Optimizers that override `load_state_dict` are not checked: only they know what they accept.

    Args:
        optimizer: A torch optimizer without wrappers.
        state: A state as `state_dict()` returns it.
        where: The file that it is from.
        own_state: Selects the entries for the parameters of this rank; all of them when None.

    Raises:
        ValueError: It does not.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    _check_form(state, where)
    if getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None):  # which may convert the state
        return
    groups, own_groups = state["param_groups"], optimizer.param_groups
    kind = type(optimizer).__name__
    check_hyperparameters(optimizer, groups, where)
    if own_state is not None:
        state = own_state(state)
        groups = state["param_groups"]
    sizes, own_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in own_groups]
    if sizes != own_sizes:
        raise ValueError(
            f"{where} has {len(sizes)} parameter groups with {_listed(sizes)} parameters, but the {kind} of this run "
            f"has {len(own_sizes)} with {_listed(own_sizes)}. Build the same model and parameter groups as when the "
            "checkpoint was saved."
        )
    for group, own_group in zip(groups, own_groups, strict=True):
        for name, value in own_group.items():
            if isinstance(value, Number) and not isinstance(
                group.get(name, value), (Number, torch.Tensor, type(None))
            ):
                raise ValueError(
                    f"{where} is damaged: {name!r} of a parameter group is {group[name]!r}, not a number. Load another "
                    "checkpoint."
                )
    _check_values(optimizer, state, where)


def check_hyperparameters(optimizer: Any, groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that parameter groups are those of this kind of optimizer.

    Args:
        optimizer: A torch optimizer without wrappers.
        groups: The saved parameter groups.
        where: The file that they are from.

    Raises:
        ValueError: They lack hyperparameters that it needs.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    if missing := _missing_hyperparameters(optimizer, groups):
        kind, listed = type(optimizer).__name__, [name for name in groups[0] if name != "params"]
        raise ValueError(
            f"{where} holds the state of another optimizer: the optimizer of this run is {kind}, which needs "
            f"{', '.join(map(repr, missing))}, and its parameter groups have {', '.join(map(repr, listed)) or 'nothing'}. Build the "
            f"same optimizer as when the checkpoint was saved, or load a checkpoint of {kind}."
        )


def _check_form(state: Mapping[str, Any], where: str) -> None:
    groups, values = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(values, dict) or not groups:
        raise ValueError(
            f"{where} is not the state of an optimizer: its keys are {', '.join(map(repr, state)) or 'none'}, but "
            "'state' and 'param_groups' are needed. Load another checkpoint."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(
                f"{where} is damaged: parameter group {index} does not list its 'params'. Load another checkpoint."
            )
    for number, of_parameter in values.items():
        if isinstance(number, int) and not isinstance(of_parameter, dict):
            raise ValueError(
                f"{where} is damaged: the state of parameter {number} is a {type(of_parameter).__name__}, not a dict. "
                "Load another checkpoint."
            )


def _missing_hyperparameters(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hyperparameters that an optimizer of torch reads from its groups, and that saved groups lack.

    States of older versions lack hyperparameters that `__setstate__` adds, so it is called on a stand-in. Optimizers of other
    libraries may have defaults for theirs anywhere.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return []
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults))
    copies = [dict(group) for group in groups]
    try:
        stand_in.__setstate__({"state": {}, "param_groups": copies})
    except Exception:  # a state of another class may break it
        copies = [dict(group) for group in groups]
    own = [name for name in optimizer.param_groups[0] if name in optimizer.defaults]
    return [name for name in own if any(name not in group for group in copies)]


def _check_values(optimizer: Any, state: Mapping[str, Any], where: str) -> None:
    state_names = STATE_OF_A_PARAMETER.get(type(optimizer), set())
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = state["state"].get(number)
        if not values:
            continue
        if missing := sorted(state_names - values.keys()):
            raise ValueError(
                f"{where} holds {', '.join(map(repr, values))} for parameter {number}, but {type(optimizer).__name__} "
                f"needs {', '.join(map(repr, missing))}. It is the state of another optimizer: build that one, or load "
                "another checkpoint."
            )
        for name in sorted(state_names):
            shape = getattr(values[name], "shape", None)
            if shape != parameter.shape:
                description = f"a {type(values[name]).__name__}" if shape is None else f"of shape {tuple(shape)}"
                raise ValueError(
                    f"{where} does not fit the model: {name!r} of parameter {number} is {description}, but the parameter of "
                    f"this run has shape {tuple(parameter.shape)}. Build the same model as when it was saved."
                )


def _listed(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:8]))
    return f"{shown}, ..." if len(sizes) > 8 else shown


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
    keeps_extra_state = any(
        type(submodule).set_extra_state is not nn.Module.set_extra_state for submodule in model.modules()
    )
    return keeps_extra_state or customizes_loading(model)
