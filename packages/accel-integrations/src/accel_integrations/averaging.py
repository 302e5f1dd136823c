"""Averaging losses and gradients over an accumulation window, so that gradients equal those of one large batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, final

import torch
from typing_extensions import override

from accel_integrations.prepared.prepared import Prepared
from accel_ops.modules import to_local
from accel_state.gradient_state import GradientState
from accel_state.weak import Weak


class AveragesGradients(Protocol):
    """What averaging needs of an engine: the number of ranks that average gradients, and an all-reduce over them."""

    @property
    def num_averaged(self) -> int:
        """Number of ranks that average gradients."""
        ...

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """All-reduce a weight (0-dim float32, summed) over these ranks."""
        ...


class HasPrepared(Protocol):
    """What has the record of everything that came through `prepare`."""

    @property
    def prepared(self) -> Prepared:
        """Models, optimizers, schedulers and loaders, in the order in which they were prepared."""
        ...


class StepAverage:
    """Divides each loss by the number of micro-batches in an accumulation window.

    Args:
        gradient_state: Has that number, as `num_steps`.
        divides: False where the engine's own library divides losses in backward.
    """

    communicates = False
    """Whether weights are all-reduced, so that all ranks must take part in every accumulation window."""
    is_by_window = False
    """Whether gradients are divided at the end of an accumulation window."""

    def __init__(self, gradient_state: GradientState, divides: bool = True) -> None:
        self._gradient_state = gradient_state
        self._divides = divides

    def begin_batch(self) -> None:
        """Called at the start of a micro-batch."""

    def end_batch(self) -> None:
        """Called at the end of a micro-batch."""

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """The loss (0-dim) to call backward on.

        Raises:
            ValueError: For a weight, which would have no effect.
        """
        if weight is not None:
            raise _unexpected(weight)
        if not self._divides:
            return loss
        num_steps = self._gradient_state.plugin_kwargs.get("num_steps")  # the property is a call more in every step
        return loss / num_steps if num_steps and num_steps > 1 else loss

    def finish_window(self) -> None:
        """Called before gradients are clipped or applied; losses were divided already."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint inside an accumulation window needs; nothing here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an accumulation window."""


def _unexpected(weight: Any) -> ValueError:
    return ValueError(
        f"backward() got weight={weight!r}, which has an effect only with "
        "GradientAccumulationPlugin(average_over='weights'). Set that, or call backward() without a weight."
    )


@final
class WindowAverage(StepAverage):
    """Divides gradients at the end of an accumulation window, when its total weight is known.

    Every micro-batch has a weight: 1 under "window", the number of its items under "weights". Losses are multiplied by
    it, and gradients divided by the total weight of the window over all ranks that average gradients. The gradients of
    all prepared optimizers are divided together, once per window, when the first of them is clipped or applied. A
    later loss in the same micro-batch (of another model, say) is divided before its backward pass.

    Args:
        engine: Averages gradients over `num_averaged` ranks; it owns this object.
        run: Has the record of prepared optimizers: the context of the engine.
        average_over (`"window"` or `"weights"`): Whether micro-batches have equal weights, or those passed to
            `backward`.
    """

    is_by_window = True

    def __init__(self, engine: AveragesGradients, run: HasPrepared, average_over: str) -> None:
        self._owner = Weak(engine)
        self._run = run
        self._weighted = average_over == "weights"
        self._unit: float | None = None if self._weighted else 1.0
        """Weights are divided by this unit, the same on all ranks, so that gradients keep their magnitude."""
        self._in_batch = False
        self._new_window()

    def _new_window(self) -> None:
        self._total: Any = 0.0  # in units; 0-dim tensor where weights are tensors
        self._weight: Any = None  # of this micro-batch, as given
        self._factor: Any = None  # set once gradients were divided

    @property
    def _engine(self) -> AveragesGradients:
        return self._owner.get()

    @property
    def communicates(self) -> bool:  # type: ignore[override] # known only with the mesh
        """Whether weights are all-reduced, so that all ranks must take part in every accumulation window."""
        return self._weighted and self._engine.num_averaged > 1

    # ---- collecting ---------------------------------------------------------------------------------------------

    @override
    def begin_batch(self) -> None:
        """Start a micro-batch: it has all losses up to `end_batch`. Outside of one, each loss is a micro-batch."""
        self._in_batch = True
        self._next_batch()

    @override
    def end_batch(self) -> None:
        """End the micro-batch; optimizers may still step."""
        self._in_batch = False

    def _next_batch(self) -> None:
        if self._factor is not None:
            self._new_window()
        self._weight = None

    @override
    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Count a loss.

        Args:
            loss: 0-dim, the mean over `weight` items. With a weight of 0 it must still be a finite number.
            weight: Required with "weights", not allowed with "window". All losses of a micro-batch have the same
                weight.

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
                "sum has no common denominator. Add the losses up and call backward() once, with one weight."
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
                "backward() got no weight, but GradientAccumulationPlugin(average_over='weights') needs to know over "
                "how many items each loss is a mean. Call backward(loss, weight=num_items)."
            )
        if isinstance(weight, torch.Tensor):  # its value is not read, which would synchronize with the device
            return weight.detach().to(torch.float32) if weight.device.type == "mps" else weight.detach().double()
        if not 0 <= weight < float("inf"):
            raise ValueError(
                f"backward() got weight={weight!r}: a weight is the finite, non-negative number of items over which "
                "the loss is a mean."
            )
        return float(weight)

    def _agree_on_unit(self, first: Any) -> float:
        """A power of two near the mean of the first weights over all ranks, computed once per run.

        Without it, float16 gradients summed over thousands of items would overflow.
        """
        mean = self._over_all_processes(first) / self._engine.num_averaged
        mantissa_and_exponent = torch.frexp(torch.tensor(float(mean)))
        return 2.0 ** int(mantissa_and_exponent.exponent) if float(mean) > 0 else 1.0

    @override
    def state_dict(self) -> dict[str, Any]:
        """The weight of the open window so far, which is of this rank only where micro-batches are weighted."""
        return {"total": float(self._total), "unit": self._unit, "weighted": self._weighted}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a window of that weight."""
        self._new_window()
        self._total, self._unit = state.get("total", 0.0), state.get("unit", self._unit)

    # ---- dividing -----------------------------------------------------------------------------------------------

    @override
    def finish_window(self) -> None:
        """Divide the gradients of all prepared optimizers, once per accumulation window.

        In a window whose weights are all 0 they become 0.
        """
        if self._factor is not None or self._weight is None:
            return
        self._factor = self._divisor()
        for gradients, factor in self._by_device(self._factor):
            torch._foreach_mul_(gradients, factor)

    def _divisor(self) -> Any:
        """The factor for gradients, which the engine has divided by the number of ranks already."""
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
        """The gradients of each device, each one once, with the factor on that device."""
        by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
        for optimizer in self._run.prepared.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        by_device.setdefault(parameter.grad.device, {})[id(parameter)] = to_local(parameter.grad)
        for device, gradients in by_device.items():
            yield list(gradients.values()), factor.to(device) if isinstance(factor, torch.Tensor) else factor
