"""Local SGD: no gradient synchronization; parameters are averaged every few steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class LocalSGD:
    """Trains every replica on its own and averages the parameters every few steps.

    Within the block gradients are not all-reduced, which saves most of the communication of data parallel training.
    Parameters are averaged after every `local_sgd_steps` calls of `step`, and when the block ends.

    Args:
        accelerator (`Accelerator`): The accelerator that prepared the model.
        model (`torch.nn.Module`): The prepared model.
        local_sgd_steps (`int`): Optimizer steps between two averages, at least 1.
        enabled (`bool`): False disables all of it.

    Raises:
        ValueError: The training engine does not replicate the parameters on every process, or
            `local_sgd_steps` is below 1.

    Example:
        ```python
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        ```
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.model_sync_obj: AbstractContextManager[Any] | None = None
        if not enabled:
            return
        if local_sgd_steps < 1:
            raise ValueError(f"LocalSGD got local_sgd_steps={local_sgd_steps!r}. Pass a number of at least 1.")
        if self.enabled and not accelerator.engine.allows_local_sgd:
            raise ValueError(
                f"LocalSGD cannot average parameters with the {accelerator.engine.name!r} engine "
                f"({accelerator.distributed_type}): every process needs a replica of the model, as in data "
                "parallel training. Pass enabled=False, or train without a sharding plugin."
            )

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.model_sync_obj = self.accelerator.no_sync(self.model)
            self.model_sync_obj.__enter__()
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.model_sync_obj is None:
            return
        if type is None:  # a rank that raises must not hang in a collective
            self._average_parameters()
        self.model_sync_obj.__exit__(type, value, tb)
        self.model_sync_obj = None

    def step(self) -> None:
        """Count a batch; call it once per batch, after the optimizer's step."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_parameters()

    def _average_parameters(self) -> None:
        parameters = list(self.model.parameters())
        with torch.no_grad():
            averages = self.accelerator.reduce([parameter.detach() for parameter in parameters], reduction="mean")
            for parameter, average in zip(parameters, averages, strict=True):
                parameter.copy_(average)
