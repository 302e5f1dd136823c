"""Applying the state that was read to a run: compared with the run first, rolled back where an object rejects it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import nn

from accel_data.position import Position
from accel_integrations.checkpoints.module_values import check_values, loads_itself
from accel_ops.filenames import SAMPLER_NAME, SCALER_NAME, numbered
from accel_ops.random import capture_rng_state, restore_rng_state
from accel_state.warning import warn_user
from accelerate.checkpoint.load import Checkpoint, Receivers, TrainingState
from accelerate.checkpoint.loaders import restore_order, restore_reading
from accelerate.checkpoint.save import custom_object_file
from accelerate.checkpoint.undo import Undo

KEYS_OF_ALL_SCHEDULERS = frozenset({"base_lrs", "last_epoch", "verbose"})
NUMBERS_OF_SCALERS = ("scale", "growth_factor", "backoff_factor", "growth_interval")


def check_objects(checkpoint: Checkpoint, receivers: Receivers, state: TrainingState) -> None:
    """Check that what was read fits the objects of this run, before any of them changes.

    Registered objects other than plain modules are not checked: only loading shows what they accept.

    Raises:
        ValueError: Naming the file and what does not fit.
    """
    for scheduler, state_dict in zip(receivers.schedulers, state.schedulers, strict=True):
        _warn_of_another_scheduler(scheduler, state_dict)
    for index, order in state.samplers.items():
        if order is not None:
            _check_order(order, str(checkpoint.path(numbered(f"{SAMPLER_NAME}.bin", index))))
    if state.scaler:
        for name in NUMBERS_OF_SCALERS:
            if not isinstance(state.scaler.get(name), Number):
                raise ValueError(
                    f"{checkpoint.path(SCALER_NAME)} is damaged: its {name!r} is {state.scaler.get(name)!r}, not a number. "
                    "Load another checkpoint."
                )
    for index, (obj, state_dict) in enumerate(zip(receivers.custom, state.custom, strict=True)):
        if _was_compared(obj):
            where = checkpoint.path(custom_object_file(index))
            if not isinstance(state_dict, Mapping):
                raise ValueError(f"{where} holds a {type(state_dict).__name__}, not the state dict of a module.")
            check_values(
                obj, state_dict, f"The values in {where} do not fit the registered object {index}", strict=True
            )


def _check_order(order: Mapping[str, Any], where: str) -> None:
    for name in ("iteration", "initial_seed", "epoch"):
        if type(order.get(name, 0)) is not int or "iteration" not in order:
            raise ValueError(
                f"{where} is damaged: {name!r} is {order.get(name)!r}, not an int. Load another checkpoint."
            )
    if "position" in order:
        try:
            Position.from_state(order["position"])
        except ValueError as error:
            raise ValueError(f"{where} is damaged: {error}") from None


def _warn_of_another_scheduler(scheduler: Any, state_dict: Mapping[str, Any]) -> None:
    """Warn that a scheduler loads the state of another kind of scheduler: torch's load whatever has the same name."""
    current_keys = {name for name in scheduler.state_dict() if not name.startswith("_")}
    saved = {name for name in state_dict if isinstance(name, str) and not name.startswith("_")}
    lacking, surplus = current_keys - saved - KEYS_OF_ALL_SCHEDULERS, saved - current_keys - KEYS_OF_ALL_SCHEDULERS
    if lacking and surplus:
        kind = type(getattr(scheduler, "scheduler", scheduler)).__name__
        warn_user(
            f"The checkpoint holds the state of another scheduler than {kind}: it has "
            f"{', '.join(map(repr, sorted(surplus)))} and lacks {', '.join(map(repr, sorted(lacking)))}. Only values with the "
            "same names are loaded. To start the scheduler from its beginning, do not pass it to prepare()."
        )


def apply_objects(receivers: Receivers, state: TrainingState, undo: Undo) -> None:
    """Load the states of all objects but registered modules. Objects that cannot be checked in advance come first."""
    undo.keep_random_states()  # loading may draw random numbers
    for obj, state_dict in zip(receivers.custom, state.custom, strict=True):
        if not _was_compared(obj):
            undo.keep(obj)
            obj.load_state_dict(state_dict)
    for scheduler, state_dict in zip(receivers.schedulers, state.schedulers, strict=True):
        undo.keep(scheduler)
        scheduler.load_state_dict(state_dict)
    if state.scaler is not None:
        undo.keep(receivers.scaler)
        receivers.scaler.load_state_dict(state.scaler)
    for index, loader in enumerate(receivers.dataloaders):
        undo.keep_loader(loader)
        if state.samplers.get(index) is not None:
            restore_order(loader, state.samplers[index])
        if index in state.positions:
            loader.load_state_dict(state.positions[index])
        restore_reading(loader, state.reading.get(index, {}))


def apply_compared_objects(receivers: Receivers, state: TrainingState) -> None:
    """Load the state dicts of registered modules. They are too large for an undo, but were checked and cannot fail."""
    for obj, state_dict in zip(receivers.custom, state.custom, strict=True):
        if _was_compared(obj):
            obj.load_state_dict(state_dict)


def _was_compared(obj: Any) -> bool:
    """Whether an object is a module whose `load_state_dict` depends on nothing but names and shapes."""
    return isinstance(obj, nn.Module) and not loads_itself(obj)


def apply_random_states(states: dict[str, Any] | None) -> None:
    """Restore RNG states, last of all and all or none. Those of other hardware only cause a warning."""
    if states is None:
        return
    before = capture_rng_state()
    try:
        restore_rng_state(states)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        restore_rng_state(before)
        warn_user(
            f"The RNG states of the checkpoint were not restored, because they do not fit this machine or are of another "
            f"version ({error}). The random number generators keep their current states."
        )
