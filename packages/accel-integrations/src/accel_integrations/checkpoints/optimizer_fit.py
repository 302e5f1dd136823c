"""Whether the state of an optimizer in a checkpoint fits the optimizer of this run, found out before either changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

SET_BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
HYPERPARAMETERS = {
    "SGD": {"momentum", "dampening", "nesterov"},
    "Adam or AdamW": {"betas", "eps", "amsgrad"},
    "NAdam": {"momentum_decay", "betas"},
    "RMSprop": {"alpha", "centered", "momentum"},
    "Adagrad": {"lr_decay", "initial_accumulator_value"},
    "Adadelta": {"rho", "eps"},
    "ASGD": {"lambd", "alpha", "t0"},
    "Rprop": {"etas", "step_sizes"},
    "LBFGS": {"history_size", "max_iter", "line_search_fn"},
    "Adafactor": {"beta2_decay", "eps", "d"},
    "Adamax or RAdam": {"betas", "eps"},
}
"""What shows which optimizer of torch a state is of, the most telling first where one includes another."""
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
"""The tensors, each of the parameter's shape, without which these cannot step once they have begun."""


def check_optimizer(
    optimizer: Any,
    state: dict[str, Any],
    where: str,
    own_state: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """See that a state fits an optimizer.

    Optimizers that load in a way of their own are only asked for the two parts that every state has; what they take
    beyond that, only they know.

    Args:
        optimizer: A torch optimizer without wrappers.
        state: As of its `state_dict()`.
        where: The file it is from.
        own_state: Gives what of the state is for the parameters of this rank; all of it when None.

    Raises:
        ValueError: It does not.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    _check_form(state, where)
    if getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None):  # which may turn it into one that fits
        return
    groups, own_groups = state["param_groups"], optimizer.param_groups
    kind = type(optimizer).__name__
    if (missing := _missing_hyperparameters(optimizer, groups)) is not None:
        raise ValueError(
            f"{where} holds the state of {_name_of(groups[0])}, but the optimizer of this run is {kind}, which needs "
            f"{', '.join(map(repr, missing))}: build the optimizer that was saved, or load a checkpoint of {kind}"
        )
    if own_state is not None:
        state = own_state(state)
        groups = state["param_groups"]
    sizes, own_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in own_groups]
    if sizes != own_sizes:
        raise ValueError(
            f"{where} has {len(sizes)} parameter groups with {_listed(sizes)} parameters, but the {kind} of this run has "
            f"{len(own_sizes)} with {_listed(own_sizes)}: build the model and its groups as when it was saved"
        )
    for group, own_group in zip(groups, own_groups, strict=True):
        for name, value in own_group.items():
            if isinstance(value, Number) and not isinstance(
                group.get(name, value), (Number, torch.Tensor, type(None))
            ):
                raise ValueError(f"{where} is damaged: {name!r} of a parameter group is {group[name]!r}, no number")
    _check_values(optimizer, state, where)


def _check_form(state: Mapping[str, Any], where: str) -> None:
    groups, values = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(values, dict) or not groups:
        raise ValueError(
            f"{where} is no state of an optimizer: its keys are {', '.join(map(repr, state)) or 'none'}, 'state' and "
            "'param_groups' are needed. Load another checkpoint"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(f"{where} is damaged: parameter group {index} does not list its 'params'")
    for number, of_parameter in values.items():
        if isinstance(number, int) and not isinstance(of_parameter, dict):
            raise ValueError(
                f"{where} is damaged: the state of parameter {number} is a {type(of_parameter).__name__}, not a dict"
            )


def _missing_hyperparameters(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """What shows that groups are those of another kind of optimizer; None when nothing does.

    Older states lack hyperparameters that came later, which the optimizer itself adds; so it is asked, with a stand-in.
    Others have more, which schedulers and users added. Only both together show another optimizer.
    """
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    copies = [dict(group) for group in groups]
    try:
        stand_in.__setstate__({"state": {}, "param_groups": copies})
    except Exception:  # that of another kind may be too strange
        copies = [dict(group) for group in groups]
    missing = [name for name in optimizer.defaults if any(name not in group for group in copies)]
    known = set().union(SET_BY_SCHEDULERS, optimizer.defaults, *optimizer.param_groups)
    surplus = any(name not in known for group in groups for name in group)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return missing if missing and (surplus or is_torchs) else None


def _name_of(group: Mapping[str, Any]) -> str:
    """The optimizer that a parameter group is of, by its hyperparameters."""
    name = next((name for name, wanted in HYPERPARAMETERS.items() if wanted <= group.keys()), "")
    listed = ", ".join(repr(key) for key in group if key != "params")
    return f"{name} ({listed})" if name else f"an optimizer with {listed or 'no hyperparameters'}"


def _check_values(optimizer: Any, state: Mapping[str, Any], where: str) -> None:
    wanted = STATE_OF_A_PARAMETER.get(type(optimizer), set())
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = state["state"].get(number)
        if not values:
            continue
        if missing := sorted(wanted - values.keys()):
            raise ValueError(
                f"{where} holds {', '.join(map(repr, values))} for parameter {number}, but {type(optimizer).__name__} needs "
                f"{', '.join(map(repr, missing))}: it is the state of another optimizer"
            )
        for name in sorted(wanted):
            shape = getattr(values[name], "shape", None)
            if shape != parameter.shape:
                found = f"a {type(values[name]).__name__}" if shape is None else f"of shape {tuple(shape)}"
                raise ValueError(
                    f"{where} does not fit the model: {name!r} of parameter {number} is {found}, the parameter of this run "
                    f"is of shape {tuple(parameter.shape)}. Build the model as it was when saved"
                )


def _listed(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:8]))
    return f"{shown}, ..." if len(sizes) > 8 else shown
