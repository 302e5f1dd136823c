"""The interface of an accelerator that checkpoints use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_integrations.engines.engine import Engine
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.settings.project import ProjectConfiguration


class AcceleratorInterface(Protocol):
    """A training run: the objects that a checkpoint stores, and where.

    Attributes:
        step: Micro-batches since the last end of a data loader.
    """

    step: int
    state: AcceleratorState
    engine: Engine
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    @property
    def _custom_objects(self) -> list[Any]: ...

    def get_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict of a model."""
        ...
