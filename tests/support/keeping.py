"""The least that a checkpoint keeper asks of an accelerator, for tests of keeping alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from accel_integrations.engines.engine import Engine
from accel_integrations.precision.autocast import FullPrecision
from accel_integrations.precision.precision import Precision
from accel_integrations.prepared.prepared import Prepared
from accel_state.gradient_state import GradientState
from accel_state.processes import PartialState
from accel_state.settings.project import ProjectConfiguration
from accelerate.checkpoint.keeper import CheckpointKeeper
from accelerate.model_folder import save_model


class PlainEngine(Engine):
    """Models are what they are; it needs no run."""

    num_averaged = 1
    is_replicated = False

    name = "plain"

    def __init__(self, prepared: Prepared) -> None:
        self.context: Any = SimpleNamespace(prepared=prepared, keeps_full_states=True)
        self.precision = FullPrecision()
        self.gradient_state = GradientState()

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> Any:
        return nullcontext()

    sync_next_backward = no_sync

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> Any:
        return nullcontext()

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()


class ScaledPrecision(Precision):
    """Nothing but a loss scale to be kept."""

    name = "fp16"

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


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
    project_configuration: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    step: int = 0
    state: Any = field(default_factory=lambda: PartialState(cpu=True))

    def __post_init__(self) -> None:
        models = self._models
        self.engine = PlainEngine(Prepared(models, models, self._optimizers, self._schedulers, self._dataloaders))
        self.keeper = CheckpointKeeper(self)  # type: ignore[arg-type]
        self.save_model = partial(save_model, self)  # type: ignore[arg-type]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.keeper.save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        self.keeper.load_state(*args, **kwargs)

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
        actual = {float(self.step), *(counter.count for counter in self._custom_objects)}
        for model in self._models:
            actual.update(value for parameter in model.parameters() for value in parameter.flatten().tolist())
        return actual | {group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups}


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
