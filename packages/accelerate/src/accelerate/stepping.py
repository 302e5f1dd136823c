"""One training step: when gradients are exchanged, how the loss becomes gradients, and what bounds them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from reprlib import repr as shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.lomo import lomo_backward
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.prepared import is_prepared
from accel_ops.collectives import reduce
from accel_state import supervision

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.prepared.prepared import Prepared
    from accel_state.gradient_state import GradientState


class StepController:
    """Counts micro-batches, decides which of them end a window, and runs backward and clipping accordingly.

    Args:
        engine: The training engine.
        gradient_state: Where the decision is kept; prepared optimizers and schedulers read it.
        prepared: What came through `prepare`.

    Attributes:
        step (`int`): Micro-batches since the last end of a data loader.
        has_lomo_optimizer (`bool`): Whether an optimizer of the `lomo_optim` library was prepared.
        flag_tensor (`torch.Tensor`, *optional*): 0-dim, 1 while this process's trigger is raised.
    """

    def __init__(self, engine: Engine, gradient_state: GradientState, prepared: Prepared) -> None:
        self.engine = engine
        self.gradient_state = gradient_state
        self.prepared = prepared
        self.step = 0
        self.has_lomo_optimizer = False
        self.flag_tensor: torch.Tensor | None = None
        self._checked: tuple[nn.Module, ...] = ()  # the models of the last `accumulate`, found in order

    # ---- accumulating -------------------------------------------------------------------------------------------

    def begin_batch(self) -> bool:
        """Count a micro-batch.

        Returns:
            Whether its backward exchanges gradients between processes.
        """
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % state.num_steps == 0
        state._set_sync_gradients(sync)
        return sync or state.plugin_kwargs.get("sync_each_batch", False)

    def models_among(self, given: tuple[Any, ...]) -> tuple[nn.Module, ...]:
        """The models that `accumulate` got, those in lists too; the same ones are checked once.

        Raises:
            TypeError: For something that is no model.
            RuntimeError: When nothing was prepared at all.
        """
        if given == self._checked:
            return given
        found = tuple(model for entry in given for model in (entry if isinstance(entry, (list, tuple)) else (entry,)))
        if found == self._checked:
            return found
        for model in found:
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"accumulate() got {shorten(model)} of type {type(model).__name__}: pass the prepared models, as in "
                    "`with accelerator.accumulate(model):`."
                )
        known = self.prepared
        if not (known.models or known.optimizers or known.dataloaders or any(map(is_prepared, found))):
            raise RuntimeError(
                f"accumulate() got {', '.join(type(model).__name__ for model in found)}, but this accelerator has "
                "prepared nothing: call `model, optimizer, ... = accelerator.prepare(model, optimizer, ...)` first."
            )
        self._checked = found
        return found

    def hold_back(self, models: tuple[nn.Module, ...]) -> AbstractContextManager[Any]:
        """A context in which the backward of none of `models` exchanges gradients."""
        if len(models) == 1:
            return self.engine.no_sync(models[0])
        contexts = ExitStack()
        for model in models:
            contexts.enter_context(self.engine.no_sync(model))
        return contexts

    # ---- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Accumulate the gradients of `loss`; see `Accelerator.backward`."""
        if supervision.counter is not None:  # `report_progress`, without a call in every step
            supervision.counter[0] += 1
        self.engine.backward(self.engine.averaging.add(loss, weight), **kwargs)

    def step_in_backward(self) -> None:
        """Let backward update parameters, from now on, whenever it is given a learning rate: for LOMO optimizers."""
        self.has_lomo_optimizer = True
        self.backward = self._backward_or_step  # type: ignore[method-assign] # others need not ask in every step

    def _backward_or_step(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        if "learning_rate" in kwargs:
            self.lomo_backward(self.engine.averaging.add(loss, weight), kwargs["learning_rate"])
        else:
            StepController.backward(self, loss, weight, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Backward and update in one go, by the prepared LOMO optimizers; see `Accelerator.lomo_backward`."""
        lomo_backward(loss, learning_rate, self.plain_optimizers())

    def plain_optimizers(self, chosen: Any = None) -> list[Any]:
        """The torch optimizers behind `chosen` prepared ones (one, several, or all of them when None)."""
        if chosen is None:
            chosen = self.prepared.optimizers
        elif not isinstance(chosen, (list, tuple)):
            chosen = [chosen]
        return [_unwrap_optimizer(optimizer) for optimizer in chosen]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients; see `Accelerator.unscale_gradients`."""
        self.engine.unscale_gradients(self.plain_optimizers(optimizer))
        if self.engine.averaging.is_by_window and self.gradient_state.sync_gradients:
            self.engine.averaging.finish_window()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
    ) -> torch.Tensor | None:
        """Bound the joint norm; see `Accelerator.clip_grad_norm_`."""
        self.unscale_gradients()
        return self.engine.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bound every element; see `Accelerator.clip_grad_value_`."""
        self.unscale_gradients()
        self.engine.clip_grad_value_(parameters, clip_value)

    # ---- triggers -----------------------------------------------------------------------------------------------

    def set_trigger(self) -> None:
        """Raise this process's flag."""
        self.flag_tensor = torch.tensor(1, device=self.engine.context.state.device)

    def check_trigger(self) -> bool:
        """Whether any process raised its flag; lowers it."""
        device = self.engine.context.state.device
        mine = torch.tensor(0, device=device) if self.flag_tensor is None else self.flag_tensor
        raised = bool(reduce(mine, reduction="sum") >= 1)
        self.flag_tensor = torch.tensor(0, device=device)
        return raised

    def forget(self) -> None:
        """Start over, holding on to no model."""
        self.step = 0
        self.has_lomo_optimizer = False
        vars(self).pop("backward", None)
        self._checked = ()


class Accumulation(ContextDecorator):
    """One micro-batch; what `Accelerator.accumulate` returns.

    Not a generator: this runs at every step, and most steps have nothing to hold back.
    """

    __slots__ = ("_controller", "_given", "_held")

    def __init__(self, controller: StepController, given: tuple[Any, ...]) -> None:
        self._controller = controller
        self._given = given
        self._held: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        controller = self._controller
        models = controller.models_among(self._given)
        if controller.engine.averaging.is_by_window:
            controller.engine.averaging.begin_batch()
        if controller.begin_batch():
            self._held = None
        else:
            self._held = controller.hold_back(models)
            self._held.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._controller.engine.averaging.is_by_window:
            self._controller.engine.averaging.end_batch()
        if self._held is not None:
            self._held.__exit__(kind, error, trace)


def _unwrap_optimizer(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
