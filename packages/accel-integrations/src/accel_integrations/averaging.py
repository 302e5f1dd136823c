"""Gradients that equal the big batch's, however a window is cut into micro-batches and shared between processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, final

import torch

from accel_integrations.prepared.prepared import Prepared
from accel_ops.modules import to_local
from accel_state.gradient_state import GradientState


class AveragesGradients(Protocol):
    """What is asked of an engine: over how many ranks it averages gradients, and the sum of a number over these."""

    @property
    def num_averaged(self) -> int:
        """How many ranks."""
        ...

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum of a weight (0-dim float32) over them."""
        ...


class StepAverage:
    """Divides each loss by the number of micro-batches in an accumulation window; nothing is left to do at its end.

    Args:
        gradient_state: Knows that number.
        divides: False where the engine's own library divides losses in backward.
    """

    communicates = False
    """Whether ranks exchange weights, so that all must take part in every window."""
    is_by_window = False
    """Whether gradients are divided at the end of a window."""

    def __init__(self, gradient_state: GradientState, divides: bool = True) -> None:
        self._gradient_state = gradient_state
        self._divides = divides

    def begin_batch(self) -> None:
        """A micro-batch begins."""

    def end_batch(self) -> None:
        """The micro-batch ends."""

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """The loss (0-dim) to call backward on.

        Raises:
            ValueError: For a weight, which would have no effect.
        """
        if weight is not None:
            raise _unexpected(weight)
        if self._divides and (num_steps := self._gradient_state.num_steps) > 1:
            return loss / num_steps
        return loss

    def finish_window(self) -> None:
        """Divide what is left to be divided: nothing."""


def _unexpected(weight: Any) -> ValueError:
    return ValueError(
        f"backward() got weight={weight!r}, which only GradientAccumulationPlugin(average_over='weights') takes into "
        "account: choose that, or leave the weight out."
    )


@final
class WindowAverage(StepAverage):
    """Divides a window's gradient at its end, when it is known what the window held.

    Every micro-batch has a weight: 1 under "window", the number of its items under "weights". Losses are multiplied by
    it, and gradients divided by the weight of the whole window, over all processes whose gradients are averaged. All
    gradients of all prepared optimizers are divided together, once a window, when first one of them is clipped or
    applied. A loss that follows in the same micro-batch (of another model, say) is divided beforehand.

    Args:
        engine: Knows over how many ranks it averages.
        prepared: Knows the optimizers.
        average_over (`"window"` or `"weights"`): What counts.
    """

    is_by_window = True

    def __init__(self, engine: AveragesGradients, prepared: Prepared, average_over: str) -> None:
        self._engine = engine
        self._prepared = prepared
        self._weighted = average_over == "weights"
        self._unit: float | None = None if self._weighted else 1.0
        """Weights are counted in this unit, the same on all processes, so that gradients keep their usual size."""
        self._in_batch = False
        self._new_window()

    def _new_window(self) -> None:
        self._total: Any = 0.0  # in units; 0-dim tensor where weights are tensors
        self._weight: Any = None  # of this micro-batch, as given
        self._factor: Any = None  # set once gradients were divided

    @property
    def communicates(self) -> bool:  # type: ignore[override] # known only with the mesh
        """Whether processes exchange weights, so that all must take part in every window."""
        return self._weighted and self._engine.num_averaged > 1

    # ---- collecting ---------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A micro-batch begins, to which all losses up to `end_batch` belong. Elsewhere each loss is one by itself."""
        self._in_batch = True
        self._next_batch()

    def end_batch(self) -> None:
        """The micro-batch ends; its optimizers may still step."""
        self._in_batch = False

    def _next_batch(self) -> None:
        if self._factor is not None:
            self._new_window()
        self._weight = None

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Count a loss.

        Args:
            loss: 0-dim, the mean over `weight` items. With a weight of 0 it must still be a finite number.
            weight: Needed under "weights", refused under "window". All losses of a micro-batch have the same.

        Returns:
            The loss to call backward on.

        Raises:
            ValueError: For a weight that is missing, unexpected, negative, or differs within a micro-batch.
        """
        weight = self._checked(weight)
        if not self._in_batch:
            self._next_batch()
        if self._unit is None:
            self._unit = self._agree_on_unit(weight)
        in_units = weight / self._unit
        if self._weight is None:
            self._weight = weight
            self._total = self._total + in_units
        elif self._weighted and weight is not self._weight and float(weight) != float(self._weight):
            raise ValueError(
                f"backward() got weight={weight!r} and weight={self._weight!r} for losses of one micro-batch, whose "
                "sum has no common denominator: add the losses up and call backward() once, with one weight."
            )
        if self._factor is not None:
            in_units = in_units * self._factor
        return loss * in_units if self._weighted or self._factor is not None else loss

    def _checked(self, weight: float | torch.Tensor | None) -> Any:
        if not self._weighted:
            if weight is not None:
                raise _unexpected(weight)
            return 1.0
        if weight is None:
            raise ValueError(
                "GradientAccumulationPlugin(average_over='weights') needs to know over how many items each loss is a "
                "mean: call backward(loss, weight=num_items)."
            )
        if isinstance(weight, torch.Tensor):  # its value is not looked at, which would wait for the device
            return weight.detach().to(torch.float32) if weight.device.type == "mps" else weight.detach().double()
        if not 0 <= weight < float("inf"):
            raise ValueError(f"backward() got weight={weight!r}: a loss is a mean over a finite number of items.")
        return float(weight)

    def _agree_on_unit(self, first: Any) -> float:
        """A power of two near the mean of the first weights, once in a run.

        Were gradients kept in their sum over thousands of items, those in float16 would overflow.
        """
        mean = self._over_all_processes(first) / self._engine.num_averaged
        mantissa_and_exponent = torch.frexp(torch.tensor(float(mean)))
        return 2.0 ** int(mantissa_and_exponent.exponent) if float(mean) > 0 else 1.0

    # ---- dividing -----------------------------------------------------------------------------------------------

    def finish_window(self) -> None:
        """Divide the gradients of all prepared optimizers, unless that was done in this window already.

        In a window whose weights are all 0 they become 0.
        """
        if self._factor is not None or self._weight is None:
            return
        self._factor = self._divisor()
        for gradients, factor in self._by_device(self._factor):
            torch._foreach_mul_(gradients, factor)

    def _divisor(self) -> Any:
        """What gradients are multiplied by; the engine has divided them by the number of processes already."""
        if not self._weighted:
            return 1.0 / self._total
        total = self._over_all_processes(self._total)
        if isinstance(total, torch.Tensor):
            return torch.where(total > 0, self._engine.num_averaged / total, 0.0)
        return self._engine.num_averaged / total if total > 0 else 0.0

    def _over_all_processes(self, weight: Any) -> Any:
        if self._engine.num_averaged == 1:
            return weight
        return self._engine.reduce_gradient_weight(torch.as_tensor(weight, dtype=torch.float32))

    def _by_device(self, factor: Any) -> Iterator[tuple[list[torch.Tensor], Any]]:
        """Each gradient once, with the factor where it is needed."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        for optimizer in self._prepared.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        found.setdefault(parameter.grad.device, {})[id(parameter)] = to_local(parameter.grad)
        for device, gradients in found.items():
            yield list(gradients.values()), factor.to(device) if isinstance(factor, torch.Tensor) else factor
