"""Where a data loader stands in its data, as checkpoints keep it."""

from __future__ import annotations

from typing import Any


def is_stateful(loader: Any) -> bool:
    """True for a loader that knows its position within an epoch (`use_stateful_dataloader=True`)."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def loader_position(loader: Any) -> dict[str, Any] | None:
    """How far this process has come in a loader; None for loaders that do not keep count."""
    return loader.state_dict() if is_stateful(loader) else None


def sampler_state(loader: Any) -> dict[str, Any] | None:
    """Seed and epoch of a loader's seedable sampler; None where there is no such sampler."""
    sampler = _seedable_sampler(loader)
    return None if sampler is None else {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}


def restore_sampler(loader: Any, state: dict[str, Any]) -> None:
    """Continue with the order that `sampler_state` described."""
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]


def _seedable_sampler(loader: Any) -> Any:
    from accel_data.samplers import SeedableRandomSampler

    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
