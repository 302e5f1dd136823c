"""Loading states by names of parameters into engines of DeepSpeed: those of other engines, ZeRO stages or ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.deepspeed.partitions import Partitions, full_shape, partitions_of
from accel_integrations.engines.deepspeed.states import read_plain
from accel_integrations.training_state.compatibility import check_hyperparameters, check_optimizer
from accel_integrations.training_state.formats.sharded import holds_deepspeed_states
from accel_integrations.training_state.formats.zero import (
    ZeroFiles,
    engine_folder,
    zero_model_state,
    zero_optimizer_state,
)
from accel_integrations.training_state.interface import Keys, LoadRequest, PendingLoad, StoredState
from accel_integrations.training_state.loading import BuiltNames, match_model, names_by_number, read_groups
from accel_integrations.training_state.reader import LocalState, open_model_state, open_optimizer_state

if TYPE_CHECKING:
    from accel_integrations.prepared.prepared import Prepared

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass
class _StateSource:
    """What a checkpoint holds for one engine.

    Attributes:
        model: Its weights.
        optimizer: The state of its optimizer; None where it has none, or none is wanted.
        extras: Counters and the scheduler of an engine of DeepSpeed.
    """

    model: StoredState
    optimizer: StoredState | None
    extras: Mapping[str, Any]


@dataclass
class _Waiting:
    """What was read for one engine, not loaded yet."""

    engine: Any
    partitions: Partitions
    weights: dict[str, Any]
    flat_weights: list[torch.Tensor]
    state: dict[str, Any] | None
    extras: Mapping[str, Any]


@final
class NamedStatesLoad(PendingLoad):
    """States that are laid out as DeepSpeed keeps them.

    Args:
        request: The checkpoint, of any engine, and how to load it.
        engines: DeepSpeed's engines.
        others: Prepared models that are in no engine.
        prepared: The record of what was prepared.
        built_names: As `Engine.built_names`, by the engine of DeepSpeed.

    Raises:
        ValueError: An engine of this run can only load what DeepSpeed wrote with the same settings.
    """

    def __init__(
        self,
        request: LoadRequest,
        engines: Sequence[Any],
        others: Sequence[nn.Module],
        prepared: Prepared,
        built_names: Callable[[Any], BuiltNames | None],
    ) -> None:
        options = request.model_kwargs
        self._folder = request.checkpoint.folder
        self._of_deepspeed = holds_deepspeed_states(request.checkpoint.names)
        self._all_engines = engines
        self._all_others = others
        self._prepared = prepared
        self._built_names = built_names
        self._strict = bool(options.get("load_module_strict", request.strict))
        self._with_optimizers = options.get("load_optimizer_states", True) and not options.get("load_module_only")
        self._with_schedulers = options.get("load_lr_scheduler_states", True) and not options.get("load_module_only")
        self._partitions = [partitions_of(engine) for engine in engines]
        self._waiting: list[_Waiting] = []
        self._others: list[tuple[nn.Module, dict[str, Any]]] = []

    @override
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Read the states of this rank, and compare them."""
        chosen = self._prepared.wrapped_of(models)
        num_trained = 0
        for index, engine in enumerate(self._all_engines):
            trains = self._partitions[index].optimizer is not None
            if engine in chosen:
                source = self._source(engine, index, num_trained if trains and self._with_optimizers else None)
                self._waiting.append(self._read(engine, self._partitions[index], source))
            num_trained += trains
        for index, model in enumerate(self._all_others):
            if model in chosen:
                self._others.append((model, self._read_other(model, index)))

    @override
    def apply(self) -> None:
        """Load the other models, then each engine, and release what was read of each."""
        for model, weights in self._others:
            model.load_state_dict(weights)
        while self._waiting:
            _apply(self._waiting.pop(0), self._strict, self._with_schedulers)

    # ---- reading ------------------------------------------------------------------------------------------------

    def _source(self, engine: Any, index: int, optimizer: int | None) -> _StateSource:
        """What the checkpoint holds for an engine.

        Args:
            engine: The engine.
            index: Its position among the engines.
            optimizer: The position of its optimizer; None where its state is not wanted.
        """
        if self._of_deepspeed:
            files = ZeroFiles.read(engine_folder(self._folder, index))
            return _StateSource(
                zero_model_state(files), None if optimizer is None else zero_optimizer_state(files), files.model
            )
        position = next(place for place, model in enumerate(self._prepared.wrapped) if model is engine)
        state = None if optimizer is None else open_optimizer_state(self._folder, optimizer)
        model = open_model_state(self._folder, position)
        if isinstance(model, LocalState) or isinstance(state, LocalState):
            raise ValueError(
                f"The checkpoint {self._folder} was saved as LOCAL_STATE_DICT, which only FSDP on as many ranks can load. "
                "Load it so, and save it as SHARDED_STATE_DICT."
            )
        return _StateSource(model, state, {})

    def _read(self, engine: Any, partitions: Partitions, source: _StateSource) -> _Waiting:
        if self._with_schedulers and engine.lr_scheduler is not None and not source.extras.get("lr_scheduler"):
            raise ValueError(
                f"The checkpoint {self._folder} holds no state of {type(engine.lr_scheduler).__name__}, which DeepSpeed "
                "steps in this run. Use a scheduler of torch in place of DummyScheduler, as when it was saved, or pass "
                "load_lr_scheduler_states=False to begin its schedule anew."
            )
        meta_state = {
            name: torch.empty(full_shape(value), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in engine.module.state_dict(keep_vars=True).items()
        }
        sources = match_model(source.model, meta_state, engine.module, strict=self._strict)
        flat = partitions.read_flat_weights(source.model, sources)
        weights = partitions.read_weights(source.model, sources)
        state = None
        if source.optimizer is not None:
            built = self._built_names(engine)
            state = _read_optimizer(source.optimizer, partitions, built or [list(each) for each in partitions.shapes])
        return _Waiting(engine, partitions, weights, flat, state, source.extras)

    def _read_other(self, model: nn.Module, index: int) -> dict[str, Any]:
        if self._of_deepspeed:
            return read_plain(self._folder, index)
        position = next(place for place, one in enumerate(self._prepared.wrapped) if one is model)
        stored = open_model_state(self._folder, position)
        sources = match_model(stored, model.state_dict(), model, strict=True)
        return {name: stored.read_entry(keys) for name, keys in sources.items()}


def _read_optimizer(stored: StoredState, partitions: Partitions, built: BuiltNames) -> dict[str, Any]:
    """The state of the optimizer inside, as its `load_state_dict` takes it: a parameter for each flat buffer.

    Raises:
        ValueError: It is that of another model or optimizer, or cannot be joined into flat buffers.
    """
    groups = read_groups(stored)
    if not type(partitions.optimizer).__module__.startswith("deepspeed."):  # whose Adam has other options than torch's
        check_hyperparameters(partitions.optimizer, groups, str(stored.where))
    names = names_by_number(groups, built)
    entries: dict[str, dict[str, Keys]] = {}
    for keys in (*stored.shapes, *stored.objects):
        if keys[0] == "state" and len(keys) > 2:
            entries.setdefault(names.get(keys[1], keys[1]), {})[".".join(keys[2:])] = keys
    trained_names = {name for shapes in partitions.shapes for name in shapes}
    if unknown := sorted(entries.keys() - trained_names):
        raise ValueError(
            f"The optimizer state in {stored.where} is that of another model: {', '.join(map(repr, unknown))} is not "
            "trained in this run. Prepare the same objects as when it was saved, in the same order."
        )
    saved_group = {names.get(str(one), str(one)): group for group in groups for one in group["params"]}
    state_dict: dict[str, Any] = {"state": {}, "param_groups": []}
    for own_group, members in partitions.groups():
        held = [name for index in members for name in partitions.shapes[index]]
        options = next((saved_group[name] for name in held if name in saved_group), own_group)
        number = len(state_dict["state"])
        merged = {**own_group, **options, "params": list(range(number, number + len(members)))}
        for index in members:
            state_dict["state"][len(state_dict["state"])] = _read_buffer(stored, partitions, index, entries)
        state_dict["param_groups"].append(merged)
    state_dict["state"] = {number: values for number, values in state_dict["state"].items() if values}
    with partitions.with_parameters():
        check_optimizer(partitions.optimizer, state_dict, str(stored.where))
    partitions.adapt(state_dict)
    return state_dict


def _read_buffer(
    stored: StoredState, partitions: Partitions, index: int, entries: Mapping[str, Mapping[str, Keys]]
) -> dict[str, Any]:
    """The optimizer state of a flat buffer."""
    shapes = partitions.shapes[index]
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for name in shapes for key in entries.get(name, {})):
        keys = {name: entries[name][key] for name in shapes if key in entries.get(name, {})}
        if all(stored.shapes.get(one) == tuple(shapes[name]) for name, one in keys.items()) and key != "step":
            state[key] = partitions.fill(index, stored, keys.get)
            continue
        values = [stored.read_entry(one) for one in keys.values()]
        if any(not _is_one(value, values[0]) for value in values):
            raise ValueError(
                f"{stored.where} holds different values of {key!r} for {', '.join(map(repr, keys))}, but ZeRO keeps one "
                "for all parameters of a group. Put them into parameter groups of their own, or load with another "
                "engine."
            )
        state[key] = values[0]
    return state


def _is_one(value: Any, first: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor):
        return value.dim() == 0 and torch.equal(value, first)
    return type(value) is type(first) and bool(value == first)


# ---- loading --------------------------------------------------------------------------------------------------------


def _apply(waiting: _Waiting, strict: bool, with_schedulers: bool) -> None:
    engine = waiting.engine
    waiting.partitions.load(waiting.weights, waiting.flat_weights, waiting.state, strict)
    for name in COUNTERS:
        if name in waiting.extras:
            setattr(engine, name, waiting.extras[name])
    if with_schedulers and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(waiting.extras["lr_scheduler"])
