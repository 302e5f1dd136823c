"""Giving a run the state that was read: it is compared with the run first, and taken back where an object refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import nn

from accel_integrations.checkpoints.module_values import check_values, loads_itself
from accel_ops.filenames import SAMPLER_NAME, SCALER_NAME, numbered
from accel_ops.random import capture_rng_state, restore_rng_state
from accel_state.warning import warn_user
from accelerate.checkpoint.load import Checkpoint, Receivers, TrainingState
from accelerate.checkpoint.loaders import restore_order
from accelerate.checkpoint.save import custom_object_file
from accelerate.checkpoint.undo import Undo

KEYS_OF_ALL_SCHEDULERS = frozenset({"base_lrs", "last_epoch", "verbose"})
NUMBERS_OF_SCALERS = ("scale", "growth_factor", "backoff_factor", "growth_interval")


def check_objects(checkpoint: Checkpoint, receivers: Receivers, state: TrainingState) -> None:
    """See that what was read fits the objects of this run, before any of them changes.

    Objects of the user's own are not asked: only loading shows what they take.

    Raises:
        ValueError: Naming the file and what does not fit.
    """
    for scheduler, found in zip(receivers.schedulers, state.schedulers, strict=True):
        _warn_of_another_scheduler(scheduler, found)
    for index, order in state.samplers.items():
        if order is not None:
            _check_order(order, str(checkpoint.path(numbered(f"{SAMPLER_NAME}.bin", index))))
    if state.scaler:
        for name in NUMBERS_OF_SCALERS:
            if not isinstance(state.scaler.get(name), Number):
                raise ValueError(
                    f"{checkpoint.path(SCALER_NAME)} is damaged: its {name!r} is {state.scaler.get(name)!r}, no number"
                )
    for index, (obj, found) in enumerate(zip(receivers.custom, state.custom, strict=True)):
        if _was_compared(obj):
            where = checkpoint.path(custom_object_file(index))
            if not isinstance(found, Mapping):
                raise ValueError(f"{where} holds a {type(found).__name__} instead of the state of a module")
            check_values(obj, found, f"The values in {where} do not fit the registered object {index}", strict=True)


def _check_order(order: Mapping[str, Any], where: str) -> None:
    for name in ("iteration", "initial_seed", "epoch"):
        if type(order.get(name, 0)) is not int or "iteration" not in order:
            raise ValueError(f"{where} is damaged: {name!r} is {order.get(name)!r}, no int. Load another checkpoint")


def _warn_of_another_scheduler(scheduler: Any, found: Mapping[str, Any]) -> None:
    """Say that a schedule goes on with the state of another one: torch's take over what has the same name."""
    own = {name for name in scheduler.state_dict() if not name.startswith("_")}
    saved = {name for name in found if isinstance(name, str) and not name.startswith("_")}
    lacking, surplus = own - saved - KEYS_OF_ALL_SCHEDULERS, saved - own - KEYS_OF_ALL_SCHEDULERS
    if lacking and surplus:
        kind = type(getattr(scheduler, "scheduler", scheduler)).__name__
        warn_user(
            f"The checkpoint holds the state of another scheduler than {kind}: it has "
            f"{', '.join(map(repr, sorted(surplus)))} and lacks {', '.join(map(repr, sorted(lacking)))}. What has the same name "
            "is taken over; leave the scheduler out of prepare if it is to start anew"
        )


def apply_objects(receivers: Receivers, state: TrainingState, undo: Undo) -> None:
    """Give all objects but modules their states, those first whose answer only they know."""
    undo.keep_random_states()  # loading may draw random numbers
    for obj, found in zip(receivers.custom, state.custom, strict=True):
        if not _was_compared(obj):
            undo.keep(obj)
            obj.load_state_dict(found)
    for scheduler, found in zip(receivers.schedulers, state.schedulers, strict=True):
        undo.keep(scheduler)
        scheduler.load_state_dict(found)
    if state.scaler is not None:
        undo.keep(receivers.scaler)
        receivers.scaler.load_state_dict(state.scaler)
    for index, loader in enumerate(receivers.dataloaders):
        undo.keep_loader(loader)
        if state.samplers.get(index) is not None:
            restore_order(loader, state.samplers[index])
        if index in state.positions:
            loader.load_state_dict(state.positions[index])


def apply_compared_objects(receivers: Receivers, state: TrainingState) -> None:
    """Give registered modules their values: too large to be kept, but they were compared and cannot refuse."""
    for obj, found in zip(receivers.custom, state.custom, strict=True):
        if _was_compared(obj):
            obj.load_state_dict(found)


def _was_compared(obj: Any) -> bool:
    """Whether an object is a module of which names and shapes say all about what it takes."""
    return isinstance(obj, nn.Module) and not loads_itself(obj)


def apply_random_states(states: dict[str, Any] | None) -> None:
    """Restore random states, last of all, or none; those of other hardware are no reason to lose the rest."""
    if states is None:
        return
    before = capture_rng_state()
    try:
        restore_rng_state(states)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        restore_rng_state(before)
        warn_user(
            f"The random states do not fit this machine or are of another version ({error}): random choices start anew"
        )
