"""Loading states into prepared models and optimizers: everything is read and compared before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_integrations.prepared.parameters import plain_name
from accel_integrations.training_state.compatibility import check_hyperparameters, check_optimizer
from accel_integrations.training_state.formats.forms import (
    model_of,
    model_state,
    trainable_names,
    without_compilation,
)
from accel_integrations.training_state.interface import CPU, Keys, StoredState
from accel_integrations.training_state.reader import open_model_state, open_optimizer_state
from accel_ops.tied import names_by_parameter

BuiltNames = Sequence[Sequence[str]]
"""Names of the parameters in each group of an optimizer."""


@dataclass
class LoadedStates:
    """The states that this rank needs of a checkpoint, read but not loaded yet.

    Attributes:
        models: Each prepared model with its state dict.
        optimizers: Each plain optimizer with its model and its state by parameter names.
        strict: Whether a state must have exactly the names of the model.
    """

    models: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    optimizers: list[tuple[torch.optim.Optimizer, nn.Module, dict[str, Any]]] = field(default_factory=list)
    strict: bool = True

    def apply(self) -> None:
        """Load all models and optimizers, and release what was read of each."""
        while self.models:
            model, state = self.models.pop(0)
            apply_model_state(model, state, self.strict)
        while self.optimizers:
            optimizer, model, state = self.optimizers.pop(0)
            _apply_optimizer(optimizer, model, state)


def read_states(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    *,
    owners: Sequence[nn.Module] | None = None,
    strict: bool = True,
    built_names: Callable[[Any], BuiltNames | None] = lambda _: None,
) -> LoadedStates:
    """Read the states that prepared models and optimizers need, saved by any number of ranks.

    Args:
        folder: The checkpoint.
        models: The prepared models, in the same order as when it was saved.
        optimizers: As above.
        owners: The models whose parameters the optimizers have; `models` when None.
        strict: Whether the names of models must be the same on both sides.
        built_names: As `Engine.built_names`.

    Raises:
        ValueError: A state is missing or damaged, or does not fit; the message lists all differences.
    """
    loaded = LoadedStates(strict=strict)
    for index, model in enumerate(models):
        loaded.models.append((model, read_model_state(open_model_state(folder, index), model, strict=strict)))
    for index, prepared in enumerate(optimizers):
        optimizer = getattr(prepared, "optimizer", prepared)
        model = model_of(optimizer, models if owners is None else owners)
        stored = open_optimizer_state(folder, index)
        state = read_optimizer_state(stored, optimizer, model, built_names(optimizer))
        loaded.optimizers.append((optimizer, model, state))
    return loaded


# ---- models ---------------------------------------------------------------------------------------------------------


def read_model_state(
    stored: StoredState, model: nn.Module, *, strict: bool = True, adapter_only: bool = False
) -> dict[str, Any]:
    """Read this rank's shards of a model's state.

    Args:
        stored: The state on the disk.
        model: As prepared.
        strict: Whether names must be the same on both sides.
        adapter_only: Read only trainable parameters.

    Raises:
        ValueError: The state does not fit; all differences are listed.
    """
    state_dict = model_state(model)
    if adapter_only:
        state_dict = {name: state_dict[name] for name in trainable_names(model) if name in state_dict}
    sources = match_model(stored, state_dict, model, strict=strict and not adapter_only)
    return {
        name: stored.fill(keys, state_dict[name])
        if isinstance(state_dict[name], torch.Tensor)
        else stored.read_object(keys)
        for name, keys in sources.items()
    }


def match_model(stored: StoredState, own: Mapping[str, Any], model: nn.Module, *, strict: bool) -> dict[str, Keys]:
    """The stored entry of each name of a model's state; tied parameters may be stored under one of their names.

    Args:
        stored: The state on the disk.
        own: The state dict of the model, whose tensors may be without values.
        model: The model, for its ties.
        strict: Whether names must be the same on both sides.

    Raises:
        ValueError: The state does not fit; all differences are listed.
    """
    sources = _sources(stored, own, model)
    _check_model(stored, own, sources, model, strict)
    return sources


def _sources(stored: StoredState, state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Keys]:
    """The stored entry of each name of a model's state; tied parameters may be stored under one of their names."""
    present = {".".join(keys): keys for keys in (*stored.shapes, *stored.objects)}
    sources: dict[str, Keys] = {}
    for names in _names_of_each(model):
        saved = next((name for name in names if name in present), None)
        if saved is not None:
            sources |= {name: present[saved] for name in names if name in state_dict}
    return sources | {name: present[name] for name in state_dict if name in present}


def _names_of_each(model: nn.Module) -> Iterator[list[str]]:
    """All names of each parameter, also of those that FSDP version 1 has joined into flat ones."""
    for names in names_by_parameter(model).values():
        yield [_own_name(name) for name in names]
    for path, module in model.named_modules():
        flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        for info in getattr(flat, "_shared_param_infos", ()):
            prefix = f"{path}." if path else ""
            pairs = ((info.prim_module_name, info.prim_param_name), (info.module_name, info.param_name))
            yield [_own_name(prefix + ".".join(filter(None, pair))) for pair in pairs]


def _check_model(
    stored: StoredState, state_dict: Mapping[str, Any], sources: Mapping[str, Keys], model: nn.Module, strict: bool
) -> None:
    problems = [
        f"{name!r} is {stored.shapes[keys]}, the model has {tuple(state_dict[name].shape)}"
        for name, keys in sources.items()
        if isinstance(state_dict[name], torch.Tensor) and stored.shapes.get(keys) != tuple(state_dict[name].shape)
    ]
    if strict:
        used = set(sources.values())
        problems += [f"{name!r} is missing" for name in state_dict if name not in sources]
        problems += [
            f"{'.'.join(keys)!r} is not in the model" for keys in (*stored.shapes, *stored.objects) if keys not in used
        ]
    if problems:
        raise ValueError(
            f"The weights in {stored.where} do not fit {type(model).__name__}: {'; '.join(problems)}. Build the same "
            "model as when it was saved, or pass strict=False to ignore missing and unexpected names."
        )


def apply_model_state(model: nn.Module, state: dict[str, Any], strict: bool) -> Any:
    """Load what `read_model_state` returned.

    Returns:
        The missing and unexpected names, as `torch.nn.Module.load_state_dict` returns them.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    return set_model_state_dict(without_compilation(model), state, options=StateDictOptions(strict=strict))


# ---- optimizers -----------------------------------------------------------------------------------------------------


def read_optimizer_state(
    stored: StoredState, optimizer: torch.optim.Optimizer, model: nn.Module, built: BuiltNames | None = None
) -> dict[str, Any]:
    """Read this rank's shards of an optimizer's state.

    Args:
        stored: The stored state, by names of parameters; or by their indices, as plain optimizers store it.
        optimizer: The plain optimizer, without wrappers.
        model: The prepared model whose parameters it has.
        built: Names of the parameters in each group as the program built the optimizer; those that it has when None.

    Returns:
        As `formats.forms.optimizer_state`.

    Raises:
        ValueError: The state does not fit.
    """
    weights = model_state(model)
    groups = read_groups(stored)
    in_place = _is_version_1(model)  # torch gathers its states where the model is
    names = names_by_number(groups, built or _present_names(optimizer, model))
    state: dict[str, dict[str, Any]] = {}
    for keys in stored.shapes:
        if keys[0] != "state":
            continue
        name, entry = names.get(keys[1], keys[1]), ".".join(keys[2:])
        like = weights.get(name)
        has_its_shape = isinstance(like, torch.Tensor) and tuple(like.shape) == stored.shapes[keys] and like.dim() > 0
        if not has_its_shape:
            value = stored.read_full(keys)
        else:
            assert like is not None
            value = stored.fill(keys, like, like.device if in_place else CPU)
        state.setdefault(name, {})[entry] = value
    for keys in stored.objects:
        if keys[0] == "state" and len(keys) > 2:
            state.setdefault(names.get(keys[1], keys[1]), {})[".".join(keys[2:])] = stored.read_object(keys)
    _check_names(state, weights, stored, type(model).__name__)
    for group in groups:
        group["params"] = [names.get(str(each), str(each)) for each in group["params"]]
    by_name = {"state": state, "param_groups": groups}
    _check_fit(optimizer, model, by_name, str(stored.where))
    return by_name


def read_groups(stored: StoredState) -> list[dict[str, Any]]:
    """The parameter groups of a stored optimizer state, stored as one object or entry by entry."""
    if ("param_groups",) in stored.objects:
        return [dict(group) for group in stored.read_object(("param_groups",))]
    groups: dict[int, dict[str, Any]] = {}
    for keys in (*stored.shapes, *stored.objects):
        if keys[0] != "param_groups":
            continue
        value = stored.read_entry(keys)
        group = groups.setdefault(int(keys[1]), {})
        if len(keys) == 3:
            group[keys[2]] = value
        else:
            group.setdefault(keys[2], {})[int(keys[3])] = value
    param_groups = [groups[index] for index in sorted(groups)]
    for group in param_groups:
        for key, value in group.items():
            if isinstance(value, dict) and value and all(isinstance(index, int) for index in value):
                values = [value[index] for index in sorted(value)]
                group[key] = tuple(values) if key == "betas" else values
    return param_groups


def names_by_number(groups: Sequence[Mapping[str, Any]], built: BuiltNames) -> dict[str, str]:
    """Parameter names for the indices in a plain optimizer's state.

    Args:
        groups: The saved parameter groups.
        built: Names of the parameters in each group of this run's optimizer, as the program built it.

    Returns:
        Name by index; empty when the state is stored by names.
    """
    saved = [number for group in groups for number in group["params"]]
    if not saved or not all(isinstance(number, int) for number in saved):
        return {}
    return {str(number): name for number, name in zip(saved, (one for names in built for one in names), strict=False)}


def _present_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> BuiltNames:
    by_parameter = {parameter: _own_name(name) for name, parameter in model.named_parameters()}
    return [[by_parameter[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _own_name(name: str) -> str:
    return plain_name(name).removeprefix("module.")


def _apply_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    if _is_version_1(model):
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(without_compilation(model), optimizer, state)
        return
    by_number = number_state(state, optimizer.param_groups, _present_names(optimizer, model))
    optimizer.state.clear()  # its memory is needed for the new one
    optimizer.load_state_dict(by_number)


def number_state(
    state: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], members: BuiltNames
) -> dict[str, Any]:
    """An optimizer's state by indices, as its `load_state_dict` takes it.

    Args:
        state: The state by names of parameters.
        param_groups: The groups of this run's optimizer, whose options are kept where the state has none.
        members: Names of the parameters in each of them.
    """
    saved_groups = {name: group for group in state["param_groups"] for name in group["params"]}
    groups: list[dict[str, Any]] = []
    number_of: dict[str, int] = {}
    for group, names in zip(param_groups, members, strict=True):
        number_of |= {name: number for number, name in enumerate(names, len(number_of))}
        saved = next((saved_groups[name] for name in names if name in saved_groups), group)
        options = {key: value for key, value in saved.items() if key != "params"}
        defaults = {key: value for key, value in group.items() if key not in options and key != "params"}
        groups.append({**defaults, **options, "params": [number_of[name] for name in names]})
    values = {number_of[name]: value for name, value in state["state"].items() if name in number_of}
    return {"state": values, "param_groups": groups}


def read_full_optimizer_state(
    stored: StoredState, optimizer: torch.optim.Optimizer, built: BuiltNames, wanted: Collection[str]
) -> dict[str, Any]:
    """Read the state of an optimizer of a full model, as its `state_dict()` would be; only entries that are wanted.

    Args:
        stored: The stored state, by names of parameters or by their indices.
        optimizer: The plain optimizer; it may have fewer parameters.
        built: Names of all parameters of the full model in each group.
        wanted: Names of parameters whose state this rank needs.

    Raises:
        ValueError: It is the state of another model.
    """
    groups = read_groups(stored)
    check_hyperparameters(optimizer, groups, str(stored.where))
    names = names_by_number(groups, built)
    state: dict[str, dict[str, Any]] = {}
    for keys in (*stored.shapes, *stored.objects):
        if keys[0] == "state" and len(keys) > 2:
            name = names.get(keys[1], keys[1])
            entry = state.setdefault(name, {})
            if name in wanted:
                value = stored.read_entry(keys)
                entry[".".join(keys[2:])] = value
    _check_names(state, {name for group in built for name in group}, stored, "the model of this run")
    for group in groups:
        group["params"] = [names.get(str(each), str(each)) for each in group["params"]]
    by_name = {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": groups}
    return number_state(by_name, optimizer.param_groups, built)


def _check_names(names: Iterable[str], parameter_names: Collection[str], stored: StoredState, model: str) -> None:
    if unknown := sorted(name for name in names if name not in parameter_names):
        raise ValueError(
            f"The optimizer state in {stored.where} is that of another model than {model}, which has no "
            f"{', '.join(map(repr, unknown))}. Prepare the same objects as when it was saved, in the same order."
        )


def _check_fit(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Check that a state is one of this kind of optimizer."""
    check_hyperparameters(optimizer, state["param_groups"], where)
    if not _is_version_1(model):
        check_optimizer(
            optimizer, number_state(state, optimizer.param_groups, _present_names(optimizer, model)), where
        )


def _is_version_1(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(without_compilation(model), FullyShardedDataParallel)
