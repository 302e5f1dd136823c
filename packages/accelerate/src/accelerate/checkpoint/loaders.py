"""The order and the position of a data loader, as checkpoints keep them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from accel_data.samplers import SeedableRandomSampler

READING_KEY = "reading"
"""The key of a process's `reading_states` in the file of its random states."""


def is_stateful(loader: Any) -> bool:
    """True for a loader that knows its position within an epoch (`use_stateful_dataloader=True`)."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def loader_position(loader: Any) -> dict[str, Any] | None:
    """The position of this process in a loader; None for loaders that do not keep it."""
    keeps_position = getattr(loader, "keeps_position", False)
    return loader.state_dict() if keeps_position else None


def order_state(loader: Any) -> dict[str, Any] | None:
    """What the order of a loader's samples depends on; None where it is unknown."""
    order = getattr(loader, "epoch_order", None)
    if order is None:  # not prepared here
        has_epochs = callable(getattr(getattr(loader, "dataset", None), "set_epoch", None))
        return {"iteration": getattr(loader, "iteration", 0)} if has_epochs else None
    state: dict[str, Any] = order.state_dict(loader)
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        state |= {"initial_seed": sampler.initial_seed, "epoch": state["iteration"]}
    return state


def reading_states(loaders: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """The random states from which this process and its workers read on in each loader, by index."""
    orders = {index: getattr(loader, "epoch_order", None) for index, loader in enumerate(loaders)}
    states = {index: order.reading_state() for index, order in orders.items() if order is not None}
    return {index: state for index, state in states.items() if state}


def restore_reading(loader: Any, states: dict[str, Any]) -> None:
    """Have the first batch of the continued epoch read from these states."""
    if getattr(loader, "epoch_order", None) is not None:
        loader.epoch_order.restore_reading(states)


def restore_order(loader: Any, state: dict[str, Any], models: Sequence[nn.Module] = ()) -> None:
    """Restore the order that `order_state` described.

    Args:
        loader: The loader to restore.
        state: What `order_state` returned.
        models: The prepared models; loops that only evaluate them do not continue an epoch.
    """
    sampler = _seedable_sampler(loader)
    if sampler is not None and "initial_seed" in state:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]
    order = getattr(loader, "epoch_order", None)
    if order is None:
        loader.iteration = state["iteration"]
    else:
        order.restore(loader, state, models)


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
