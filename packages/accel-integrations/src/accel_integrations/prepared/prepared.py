"""The registry of everything that came through `prepare`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler

PREPARED_MARK = "_is_accelerate_prepared"
"""The attribute of everything that came through `prepare`; read by other libraries."""


@dataclass(slots=True)
class Prepared:
    """Models, optimizers, schedulers, loaders and custom objects, each list in the order of preparation.

    The accelerator and its engine share one instance; the lists are changed in place and never replaced, because
    other libraries hold on to `accelerator._models` and its siblings.
    """

    models: list[nn.Module] = field(default_factory=list)
    """The models that users built; hooks of checkpoints get these."""
    wrapped: list[nn.Module] = field(default_factory=list)
    """What `prepare` made of each of them."""
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything but the custom objects registered for checkpoints."""
        for kept in (self.models, self.wrapped, self.optimizers, self.schedulers, self.dataloaders):
            kept.clear()
