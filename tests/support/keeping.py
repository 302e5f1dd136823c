"""The least that a checkpoint keeper asks of an accelerator, for tests of keeping alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_integrations.engines.engine import Engine
from accel_state.processes import PartialState
from accel_state.settings.project import ProjectConfiguration
from accelerate.checkpoint.keeper import CheckpointKeeper


class PlainEngine(Engine):
    """Models are what they are; it needs no run."""

    name = "plain"

    def __init__(self) -> None:
        pass

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        return model


class Counter:
    """An object registered for checkpoints."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@dataclass
class Kept:
    """What stands in for an accelerator."""

    _models: list[nn.Module] = field(default_factory=list)
    _optimizers: list[Any] = field(default_factory=list)
    _schedulers: list[Any] = field(default_factory=list)
    _dataloaders: list[Any] = field(default_factory=list)
    _custom_objects: list[Any] = field(default_factory=list)
    scaler: Any = None
    project_configuration: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    step: int = 0
    state: Any = field(default_factory=lambda: PartialState(cpu=True))
    engine: Any = field(default_factory=PlainEngine)

    def __post_init__(self) -> None:
        self.keeper = CheckpointKeeper(self)  # type: ignore[arg-type]
        self.save_state, self.load_state = self.keeper.save_state, self.keeper.load_state
        self.save_model = self.keeper.save_model

    def get_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()

    def fill(self, value: float) -> None:
        """Give everything that is saved the same value."""
        self.step = int(value)
        with torch.no_grad():
            for model in self._models:
                for parameter in model.parameters():
                    parameter.fill_(value)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = value
        for counter in self._custom_objects:
            counter.count = value

    def values(self) -> set[float]:
        """All values that `fill` set; one when nothing is mixed up."""
        found = {float(self.step), *(counter.count for counter in self._custom_objects)}
        for model in self._models:
            found.update(value for parameter in model.parameters() for value in parameter.flatten().tolist())
        return found | {group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups}


def make_kept(folder: Path | None = None, *, total_limit: int | None = None) -> Kept:
    """A model, its optimizer and scheduler and a counter; named automatically below `folder`, if there is one."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return Kept(
        [model],
        [optimizer],
        [torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 7])],
        _custom_objects=[Counter()],
        project_configuration=ProjectConfiguration(
            folder, automatic_checkpoint_naming=folder is not None, total_limit=total_limit
        ),
    )
