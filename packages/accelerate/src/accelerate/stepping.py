"""One training step: gradient accumulation, the backward pass, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from reprlib import repr as shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.prepared.optimizer import lomo_backward, plain_optimizer
from accel_integrations.prepared.prepared import is_prepared
from accel_ops import collectives
from accel_state import supervision
from accelerate.first_step_checks import FirstStepCheck, check_loss

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.prepared.prepared import Prepared
    from accel_state.gradient_state import GradientState
    from accelerate.finite_gradients import FiniteGradients


class StepController:
    """Counts micro-batches, decides which are sync steps, and runs the backward pass and clipping accordingly.

    Args:
        engine: The training engine.
        gradient_state: Where the decision is kept; prepared optimizers and schedulers read it.
        prepared: The record of prepared objects.

    Attributes:
        step (`int`): Micro-batches since the last end of a data loader.
        has_lomo_optimizer (`bool`): Whether an optimizer of the `lomo_optim` library was prepared.
        flag_tensor (`torch.Tensor`, *optional*): 0-dim, 1 while this process's trigger is set.
    """

    def __init__(self, engine: Engine, gradient_state: GradientState, prepared: Prepared) -> None:
        self.engine = engine
        self.gradient_state = gradient_state
        self.prepared = prepared
        self.step = 0
        self.has_lomo_optimizer = False
        self.flag_tensor: torch.Tensor | None = None
        self.first_step = FirstStepCheck(engine)
        self.finite_gradients: FiniteGradients | None = None  # where they are asked for
        self._asks_before_backward = True  # the first time, and with LOMO optimizers
        self._checked: tuple[nn.Module, ...] = ()  # the models of the last `accumulate`, found in order
        self._was_freed = False  # what was prepared is no longer known, but may still be used

    # ---- gradient accumulation ----------------------------------------------------------------------------------

    def begin_batch(self) -> bool:
        """Count a micro-batch.

        Returns:
            Whether its backward pass all-reduces gradients.
        """
        state = self.gradient_state
        settings = state.plugin_kwargs  # the properties of the state are a call more in every step
        if settings.get("sync_with_dataloader", True) and state.end_of_dataloader:
            # The last batch of a loader ends the window, however short it is: what it holds would mix with the next
            # epoch.
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % (settings.get("num_steps") or 1) == 0
        state._set_sync_gradients(sync)
        return sync or settings.get("sync_each_batch", False)

    def models_among(self, given: tuple[Any, ...]) -> tuple[nn.Module, ...]:
        """The models passed to `accumulate`, also those in lists; the same ones are checked once.

        Raises:
            TypeError: For an object that is not a module.
            RuntimeError: When nothing was prepared at all.
        """
        if given == self._checked:
            return given
        models = tuple(model for entry in given for model in (entry if isinstance(entry, (list, tuple)) else (entry,)))
        if models == self._checked:
            return models
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"accumulate() got {shorten(model)} of type {type(model).__name__}. Pass the prepared models, as in "
                    "`with accelerator.accumulate(model):`."
                )
        record = self.prepared
        is_known = bool(record.models or record.optimizers or record.dataloaders)
        if not (is_known or self._was_freed or any(map(is_prepared, models))):
            raise RuntimeError(
                f"accumulate() got {', '.join(type(model).__name__ for model in models)}, but this accelerator has not "
                "prepared anything. Call `model, optimizer, ... = accelerator.prepare(model, optimizer, ...)` first."
            )
        self._checked = models
        return models

    def no_sync(
        self, models: tuple[nn.Module, ...], of_one: Callable[[nn.Module], AbstractContextManager[Any]] | None
    ) -> AbstractContextManager[Any]:
        """A context in which the backward passes of `models` do not all-reduce gradients.

        Args:
            models: The models.
            of_one: Makes the context of a model; None for the engine's.
        """
        make = of_one or self.engine.no_sync
        if len(models) == 1:
            return make(models[0])
        contexts = ExitStack()
        for model in models:
            contexts.enter_context(make(model))
        return contexts

    # ---- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Accumulate the gradients of `loss`; see `Accelerator.backward`."""
        if supervision.counter is not None:  # `report_progress`, without a call in every step
            supervision.counter[0] += 1
        if self.finite_gradients is not None:
            self.finite_gradients.note_loss(loss)
        if self._asks_before_backward and self._is_done_by_lomo(loss, weight, kwargs):
            return
        # The loss is divided before the engine sees it, so that loss scaling and the all-reduce apply to the mean.
        self.engine.backward(self.engine.averaging.add(loss, weight), **kwargs)

    def _is_done_by_lomo(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, kwargs: dict[str, Any]
    ) -> bool:
        """Look at the run before its first backward passes; whether a LOMO optimizer has done this one."""
        check_loss(loss)
        self.first_step.before_backward()
        self._asks_before_backward = self.has_lomo_optimizer or self.first_step.is_watching
        if not self.has_lomo_optimizer or "learning_rate" not in kwargs:
            return False
        self.lomo_backward(self.engine.averaging.add(loss, weight), kwargs["learning_rate"])
        return True

    def step_in_backward(self) -> None:
        """From now on, update parameters within `backward` when a learning rate is passed: for LOMO optimizers."""
        self.has_lomo_optimizer = self._asks_before_backward = True

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Update parameters within the backward pass, by the prepared LOMO optimizers."""
        lomo_backward(loss, learning_rate, self.plain_optimizers())

    def plain_optimizers(self, chosen: Any = None) -> list[Any]:
        """The torch optimizers inside `chosen` prepared ones (one, several, or all of them when None)."""
        if chosen is None:
            chosen = self.prepared.optimizers
        elif not isinstance(chosen, (list, tuple)):
            chosen = [chosen]
        return [plain_optimizer(optimizer) for optimizer in chosen]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients; see `Accelerator.unscale_gradients`."""
        self.engine.unscale_gradients(self.plain_optimizers(optimizer))
        if self.engine.averaging.is_by_window and self.gradient_state.sync_gradients:
            self.engine.averaging.finish_window()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm; see `Accelerator.clip_grad_norm_`."""
        if isinstance(parameters, torch.nn.Module):
            raise TypeError(
                f"clip_grad_norm_() takes parameters, not a {type(parameters).__name__}. Pass model.parameters()."
            )
        # A norm means something only for gradients that are neither scaled (fp16) nor still a sum over the window.
        self.unscale_gradients()
        if self.finite_gradients is not None:
            return self.finite_gradients.clip_grad_norm_(parameters, max_norm, norm_type)
        return self.engine.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip every element of gradients; see `Accelerator.clip_grad_value_`."""
        self.unscale_gradients()
        self.engine.clip_grad_value_(parameters, clip_value)

    # ---- triggers -----------------------------------------------------------------------------------------------

    def set_trigger(self) -> None:
        """Set this process's flag."""
        self.flag_tensor = torch.tensor(1, device=self.engine.context.state.device)

    def check_trigger(self) -> bool:
        """Whether any process has set its flag; resets it."""
        device = self.engine.context.state.device
        mine = torch.tensor(0, device=device) if self.flag_tensor is None else self.flag_tensor
        raised = bool(collectives.reduce(mine, reduction="sum") >= 1)
        self.flag_tensor = torch.tensor(0, device=device)
        return raised

    def forget(self) -> None:
        """Reset all counters and drop references to models."""
        self.step = 0
        self.has_lomo_optimizer = False
        self._asks_before_backward = True
        self.first_step.forget()
        if self.finite_gradients is not None:
            self.finite_gradients.forget()
        self._checked = ()
        self._was_freed = True
        self.gradient_state._set_sync_gradients(True)  # it may have ended inside an accumulation window


class Accumulation(ContextDecorator):
    """One micro-batch; what `Accelerator.accumulate` returns.

    A class and not a generator, because it runs in every step.
    """

    __slots__ = ("_controller", "_given", "_make_no_sync", "_no_sync")

    def __init__(
        self,
        controller: StepController,
        given: tuple[Any, ...],
        make_no_sync: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._controller = controller
        self._given = given
        self._make_no_sync = make_no_sync
        self._no_sync: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        controller = self._controller
        models = controller.models_among(self._given)
        if controller.engine.averaging.is_by_window:
            controller.engine.averaging.begin_batch()
        if controller.begin_batch():
            self._no_sync = None
        else:
            self._no_sync = controller.no_sync(models, self._make_no_sync)
            self._no_sync.__enter__()
            controller.gradient_state.is_accumulating = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._controller.engine.averaging.is_by_window:
            self._controller.engine.averaging.end_batch()
        if self._no_sync is not None:
            self._controller.gradient_state.is_accumulating = False
            self._no_sync.__exit__(kind, error, trace)
