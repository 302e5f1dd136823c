"""Gradients that equal the big batch's, however a window is cut into micro-batches and shared between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine


@final
class WindowAverage:
    """Divides a window's gradient at its end, when it is known what the window held.

    Under "window" each loss counts once; under "weights" it counts as often as the items it is a mean over. The
    gradients of all prepared optimizers are divided, once a window, before they are clipped or applied.

    Args:
        engine: Knows the optimizers, and over how many processes it averages.
        average_over (`"window"` or `"weights"`): What counts.
    """

    def __init__(self, engine: Engine, average_over: str) -> None:
        self._engine = engine
        self._weighted = average_over == "weights"
        self._total: Any = 0.0  # a number, or a 0-dim tensor where weights are tensors
        self._started = False

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> torch.Tensor:
        """Count a micro-batch.

        Args:
            loss: 0-dim, the mean over `weight` items.
            weight: Needed under "weights", refused under "window".

        Returns:
            The loss to call backward on.

        Raises:
            ValueError: For a weight that is missing, unexpected or negative.
        """
        if not self._weighted:
            if weight is not None:
                raise ValueError(
                    f"backward() got weight={weight!r}, which only GradientAccumulationPlugin(average_over='weights') "
                    "takes into account: choose that, or leave the weight out."
                )
            self._started = True
            self._total += 1.0
            return loss
        if weight is None:
            raise ValueError(
                "GradientAccumulationPlugin(average_over='weights') needs to know over how many items each loss is a "
                "mean: call backward(loss, weight=num_items)."
            )
        if not isinstance(weight, torch.Tensor) and weight < 0:
            raise ValueError(f"backward() got weight={weight!r}: a loss is a mean over no less than 0 items.")
        self._started = True
        weight = weight.detach() if isinstance(weight, torch.Tensor) else float(weight)
        self._total = self._total + weight
        return loss * weight

    def finish_window(self) -> None:
        """Divide the gradients of the prepared optimizers, unless that was done for this window already.

        Raises:
            ValueError: On all processes, when all weights of the window were 0.
        """
        if not self._started:
            return
        self._started = False
        total, self._total = self._total, 0.0
        gradients = [
            parameter.grad
            for optimizer in self._engine.context.prepared.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        factor = self._over_all_processes(total) if self._weighted else 1.0 / total
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _over_all_processes(self, total: Any) -> float:
        """The engine divided by the number of processes; undo that, and divide by the weight of all."""
        engine = self._engine
        if engine.num_averaged > 1:
            total = engine.reduce_gradient_weight(torch.as_tensor(total, dtype=torch.float32))
        total = float(total)
        if total == 0.0:
            raise ValueError("All weights given to backward() in this window were 0: skip the step for such a window.")
        return engine.num_averaged / total
