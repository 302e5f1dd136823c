"""The order and the position of a data loader, as checkpoints keep them."""

from __future__ import annotations

from typing import Any

from accel_data.samplers import SeedableRandomSampler


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
    first_samples = getattr(loader, "first_samples", None)
    if first_samples is not None and "epoch_start" in state:
        state["first_samples"] = first_samples
    return state


def restore_order(loader: Any, state: dict[str, Any]) -> None:
    """Restore the order that `order_state` described."""
    sampler = _seedable_sampler(loader)
    if sampler is not None and "initial_seed" in state:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]
    if "first_samples" in state:
        loader.first_samples = state["first_samples"]
    order = getattr(loader, "epoch_order", None)
    if order is None:
        loader.iteration = state["iteration"]
    else:
        order.restore(loader, state)


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
