"""Where a data loader stands in its data, as checkpoints keep it."""

from __future__ import annotations

from typing import Any

from accel_data.samplers import SeedableRandomSampler


def is_stateful(loader: Any) -> bool:
    """True for a loader that knows its position within an epoch (`use_stateful_dataloader=True`)."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def loader_position(loader: Any) -> dict[str, Any] | None:
    """How far this process has come in a loader; None for loaders that do not keep count."""
    return loader.state_dict() if is_stateful(loader) else None


def order_state(loader: Any) -> dict[str, Any] | None:
    """What the order of a loader's samples depends on; None where it follows from the random states alone."""
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        return {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch, "iteration": loader.iteration}
    if callable(getattr(getattr(loader, "dataset", None), "set_epoch", None)):
        return {"iteration": getattr(loader, "iteration", 0)}
    return None


def restore_order(loader: Any, state: dict[str, Any]) -> None:
    """Go on with the order that `order_state` described."""
    sampler = _seedable_sampler(loader)
    if sampler is not None and "initial_seed" in state:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]
    loader.iteration = state["iteration"]


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
