"""What happens when a gradient is not finite, where a program asks for it: optimizer steps are stopped, left out or warned of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from accel_integrations.finite import is_finite, norm_of
from accel_integrations.gradients import gradients_of
from accel_integrations.prepared.optimizer import is_lomo_optimizer, plain_optimizer
from accel_integrations.prepared.prepared import Notes
from accel_ops import collectives
from accel_ops.modules import to_local
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_state.settings.finite_gradients import FiniteGradientsKwargs

MAX_WARNINGS = 10
MAX_NAMES = 5
MAX_LOSSES = 256
AXES_IN_NORM = {"dp_replicate", "dp_shard", "cp"}
"""Mesh dimensions over which a norm is the same on all ranks; along others, ranks may hold a gradient that is in their norm alone."""

Position = tuple[int, int]
"""The number of an epoch, and the index of a batch in it."""


@dataclass(slots=True)
class _Clip:
    """One call of `clip_grad_norm_`: the ids of its parameters that have not stepped since, and the norm."""

    ids: set[int]
    norm: torch.Tensor


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer: all of them, and those with gradients that were not finite since the last finite one."""

    count: int = 0
    in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    """What one rank has found: names of parameters, and its losses that are not finite."""

    names: list[str]
    losses: list[tuple[str, float]]


class FiniteGradients:
    """Asks before each optimizer step whether gradients are finite; all ranks get the same answer.

    Where gradients were clipped, the norm answers. Else each rank looks at its own gradients, and one number is all-reduced unless
    all ranks hold the same gradients.

    Args:
        settings: What to do where they are not.
        engine: The training engine.

    Raises:
        ValueError: The engine or the precision rules it out.
    """

    def __init__(self, settings: FiniteGradientsKwargs, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        if engine.unguarded_because:
            raise ValueError(
                f"FiniteGradientsKwargs(action={settings.action!r}) cannot be used with the {engine.name!r} engine: "
                f"{engine.unguarded_because}. Leave it out."
            )
        if self._is_scaled and settings.action != "skip":
            raise ValueError(
                f"FiniteGradientsKwargs(action={settings.action!r}) cannot be used with mixed_precision='fp16', whose loss scaler "
                "leaves out steps to find its scale. Choose action='skip', with a patience."
            )
        engine.clips_only_finite = True
        self._steps: Notes[torch.optim.Optimizer, _Steps] = Notes()
        self.forget()

    def forget(self) -> None:
        """Begin anew, for other models."""
        self._clips: list[_Clip] = []
        self._losses: deque[tuple[Position | None, torch.Tensor]] = deque(maxlen=MAX_LOSSES)
        self._stepped: set[int] = set()  # ids of the optimizers since the last loss
        self._num_warnings = 0

    def watch(self, optimizer: AcceleratedOptimizer) -> None:
        """Have the steps of a prepared optimizer come through here.

        Raises:
            ValueError: It updates parameters in the backward pass.
        """
        if is_lomo_optimizer(plain_optimizer(optimizer)):
            raise ValueError(
                f"FiniteGradientsKwargs cannot be used with {type(optimizer.optimizer).__name__}, which updates parameters in the "
                "backward pass. Leave it out."
            )
        optimizer.step_through(partial(self._step, optimizer._take_step or self.engine.step), optimizer._before_step)

    # ---- what a window of gradient accumulation leaves behind ---------------------------------------------------

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember a loss and the batch that it comes from; norms from before its backward pass are outdated."""
        if self._stepped:
            self._losses.clear()
            self._stepped.clear()
        self._clips.clear()
        self._losses.append((self._position(), loss.detach()))

    def _position(self) -> Position | None:
        epoch: Any = getattr(self.engine.gradient_state.active_dataloader, "epoch", None)
        return (epoch.number, epoch.batches - 1) if getattr(epoch, "batches", None) else None

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
    ) -> torch.Tensor | None:
        """Clip, and remember the norm."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = self.engine.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm is not None and 0 < norm_type < float("inf"):  # the largest of several elements need not be the NaN
            self._clips.append(_Clip(set(map(id, parameters)), norm))
        return norm

    # ---- stepping -----------------------------------------------------------------------------------------------

    def _step(
        self,
        take_step: Callable[..., bool],
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> bool:
        """Take a step as the settings say; False when it was left out."""
        if closure is not None:
            raise ValueError(
                f"FiniteGradientsKwargs cannot be used with {type(optimizer).__name__}.step(closure), which computes gradients while it "
                "steps. Call step() without a closure, or leave it out."
            )
        steps = self._steps.setdefault(optimizer, _Steps())
        steps.count += 1
        if self._is_scaled:
            is_finite = is_taken = take_step(optimizer, None)
        else:
            self.engine.unscale_gradients([optimizer])  # a pipeline averages them now
            is_finite = self._has_finite_gradients(optimizer)
            is_taken = False
        if id(optimizer) in self._stepped:  # the program has called backward on a loss by itself
            self._losses.clear()
        self._stepped.add(id(optimizer))
        if is_finite:
            steps.in_a_row = 0
            return is_taken or take_step(optimizer, None)
        steps.in_a_row += 1
        self._report(optimizer, steps)
        return self.settings.action == "warn" and take_step(optimizer, None)

    @property
    def _is_scaled(self) -> bool:
        scaler = self.engine.precision.scaler
        return scaler is not None and scaler.is_enabled()

    def _has_finite_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of an optimizer are finite on all ranks."""
        weights = _parameters_of(optimizer)
        norms = self._norms_of({id(weight) for weight in weights})
        gradients = [to_local(gradient) for gradient in gradients_of(weights)]
        total = torch.stack(norms).sum() if norms else norm_of(gradients)
        is_shared = self._is_shared(weights, bool(norms))
        if not _on_any_rank(~total.isfinite(), is_shared):
            return True
        is_bad = torch.as_tensor(not total.isfinite() if norms else not all(map(is_finite, gradients)))
        return not _on_any_rank(is_bad, is_shared)

    def _norms_of(self, ids: set[int]) -> list[torch.Tensor]:
        """The norms that cover all these parameters, each once; none where some parameters were not clipped."""
        clips = [clip for clip in self._clips if not clip.ids.isdisjoint(ids)]
        is_covered = ids <= {one for clip in clips for one in clip.ids}
        for clip in clips:
            clip.ids -= ids
        return [clip.norm for clip in clips] if is_covered else []

    def _is_shared(self, weights: Sequence[torch.Tensor], is_clipped: bool) -> bool:
        """Whether all ranks come to the same answer without asking one another."""
        engine, prepared = self.engine, self.engine.context.prepared
        if engine.context.state.num_processes == 1:
            return True
        of_models = {id(weight) for model in prepared.wrapped for weight in model.parameters()}
        is_averaged = all(getattr(model, "require_backward_grad_sync", True) for model in prepared.wrapped)
        if not is_averaged or not all(id(weight) in of_models for weight in weights):
            return False
        config = engine.context.state.parallelism_config
        is_in_norm = config is None or AXES_IN_NORM.issuperset(config.active_mesh_dims)
        return engine.is_replicated or (is_clipped and engine.shards_gradients and is_in_norm)

    # ---- telling ------------------------------------------------------------------------------------------------

    def _report(self, optimizer: torch.optim.Optimizer, steps: _Steps) -> None:
        """Warn, up to a limit, or raise; all ranks with the same text."""
        settings = self.settings
        is_over = settings.action == "stop" or steps.in_a_row == settings.patience
        if not is_over and self._num_warnings == MAX_WARNINGS:
            return
        mine = _Found(list(self._names(optimizer)), list(self._bad_losses()))
        ranks: list[_Found] = collectives.gather_object([mine])
        text = f"Gradients are not finite in optimizer step {steps.count} of this run ({self._where()}): {_describe(ranks)}"
        if is_over:
            advice = "Look at this batch again, or leave out such steps with FiniteGradientsKwargs(action='skip')."
            patience = f"They were not in {steps.in_a_row} steps in a row, which is the patience that was asked for."
            raise FloatingPointError(f"{text} {advice if settings.action == 'stop' else patience}")
        self._num_warnings += 1
        what = "The step is left out." if settings.action == "skip" else "The step is taken."
        last = " Later ones are not reported." if self._num_warnings == MAX_WARNINGS else ""
        if self.engine.context.state.is_main_process:
            warn_user(f"{text} {what}{last}")

    def _names(self, optimizer: torch.optim.Optimizer) -> Iterator[str]:
        """The parameters whose gradients are not finite, of all prepared models and of this optimizer."""
        models = self.engine.context.prepared.wrapped
        of_models = {id(weight) for model in models for weight in model.parameters()}
        for index, model in enumerate(models):
            prefix = f"model {index}: " if len(models) > 1 else ""
            for name, gradient in self.engine.named_gradients(model):
                if not is_finite(gradient):
                    yield prefix + name
        for index, weight in enumerate(_parameters_of(optimizer)):
            if id(weight) not in of_models and weight.grad is not None and not is_finite(to_local(weight.grad)):
                yield f"parameter {index} of {type(optimizer).__name__}"

    def _bad_losses(self) -> Iterator[tuple[str, float]]:
        for position, loss in self._losses:
            if not is_finite(loss):
                yield ("" if position is None else f" in batch {position[1]}"), float(loss)

    def _where(self) -> str:
        """The batches of the window: the positions are the same on all ranks."""
        places = [position for position, _ in self._losses if position is not None]
        if not places:
            here = self._position()
            places = [here] if here is not None else []
        if not places:
            return "outside of prepared loaders"
        (epoch, first), (_, last) = places[0], places[-1]
        return f"epoch {epoch}, " + (f"batch {first}" if first == last else f"batches {first} to {last}")


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _on_any_rank(flag: torch.Tensor, is_shared: bool) -> bool:
    """Whether a 0-dim flag is set on any rank; where all ranks have the same flag, it need not be all-reduced."""
    return bool(flag if is_shared else collectives.reduce(flag.float(), reduction="sum"))


def _describe(ranks: Sequence[_Found]) -> str:
    """What the ranks have found, in one or two sentences."""
    names = list(dict.fromkeys(chain.from_iterable(one.names for one in ranks)))
    holders = [rank for rank, one in enumerate(ranks) if one.names]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    where = "" if len(ranks) == 1 else f" on {_list_ranks(holders, len(ranks))}"
    text = f"{', '.join(names[:MAX_NAMES])}{more}{where}." if names else "their norm overflows."
    losses = [
        (f"{value:g}", place, rank) for rank, one in enumerate(ranks) for place, value in one.losses[:1]
    ]  # the first of each rank
    for value, place, rank in losses[:MAX_NAMES]:
        text += f" The loss is {value}{place}" + (f" on rank {rank}." if len(ranks) > 1 else ".")
    return text


def _list_ranks(chosen: Sequence[int], count: int) -> str:
    if len(chosen) == count:
        return f"all {count} ranks"
    return f"rank {chosen[0]}" if len(chosen) == 1 else f"ranks {', '.join(map(str, chosen))}"
