"""The order and the position of a data loader, as checkpoints keep them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_data.epoch import Epoch
from accel_data.samplers import SeedableRandomSampler

READING_KEY = "reading"
"""The key of a process's `reading_states` in the file of its random states."""


def loader_position(loader: Any) -> dict[str, Any] | None:
    """Torchdata's position of this process in a loader; None for loaders that read without it."""
    return loader.state_dict() if getattr(loader, "keeps_position", False) else None


def order_state(loader: Any) -> dict[str, Any] | None:
    """What the order of a loader's samples depends on, and its position; None where they are unknown."""
    epoch = _epoch_of(loader)
    if epoch is None:  # not prepared here
        has_epochs = callable(getattr(getattr(loader, "dataset", None), "set_epoch", None))
        return {"iteration": getattr(loader, "iteration", 0)} if has_epochs else None
    state: dict[str, Any] = epoch.state_dict(loader)
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        state |= {"initial_seed": sampler.initial_seed, "epoch": state["iteration"]}
    return state


def reading_states(loaders: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """The random states from which this process and its workers read on in each loader, by index."""
    epochs = {index: _epoch_of(loader) for index, loader in enumerate(loaders)}
    states = {index: epoch.reading_state() for index, epoch in epochs.items() if epoch is not None}
    return {index: state for index, state in states.items() if state}


def restore_reading(loader: Any, states: dict[str, Any]) -> None:
    """Have the first batch of the continued epoch read from these states."""
    epoch = _epoch_of(loader)
    if epoch is not None:
        epoch.restore_reading(states)


def restore_order(loader: Any, state: dict[str, Any]) -> None:
    """Restore the order and the position that `order_state` described.

    Args:
        loader: The loader to restore.
        state: What `order_state` returned.
    """
    sampler = _seedable_sampler(loader)
    if sampler is not None and "initial_seed" in state:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]
    epoch = _epoch_of(loader)
    if epoch is None:
        loader.iteration = state["iteration"]
    else:
        epoch.restore(loader, state)


def _epoch_of(loader: Any) -> Epoch | None:
    epoch = getattr(loader, "epoch", None)
    return epoch if isinstance(epoch, Epoch) else None


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
