"""Optimizers by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_cli.estimate.live_memory import LiveMemory


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer of torch.

    Attributes:
        class_name: In `torch.optim`.
        settings: Its arguments.
    """

    class_name: str
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow("AdamW"),
    "adam": OptimizerRow("Adam"),
    "sgd": OptimizerRow("SGD"),
    "sgd-momentum": OptimizerRow("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": OptimizerRow("Adagrad"),
    "rmsprop": OptimizerRow("RMSprop"),
    "adafactor": OptimizerRow("Adafactor"),
}


def make_optimizer(name: str, parameters: list[nn.Parameter], foreach: bool | None = None) -> torch.optim.Optimizer:
    """Make an optimizer.

    Args:
        name: A name in `OPTIMIZERS`.
        parameters: The parameters that it updates.
        foreach: Whether all are updated at once, which needs memory for intermediate results of their size. When None, torch
            decides by the device.
    """
    import torch

    row = OPTIMIZERS[name]
    make: Any = getattr(torch.optim, row.class_name)
    optimizer: torch.optim.Optimizer = make(parameters, foreach=foreach, **row.settings)
    return optimizer


def make_optimizer_with_state(name: str, parameters: list[nn.Parameter], memory: LiveMemory) -> torch.optim.Optimizer:
    """Make an optimizer as on a GPU that has taken its first step, so that its state is allocated and counted.

    Args:
        name: A name in `OPTIMIZERS`.
        parameters: The parameters that it updates.
        memory: The counter, in which the kind of its state is set.
    """
    import torch

    from accel_cli.estimate.training_report import OPTIMIZER

    optimizer = make_optimizer(name, parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                memory.call(value, OPTIMIZER)
    return optimizer
