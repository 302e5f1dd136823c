"""What `prepare` takes, what it leaves of the original model, and what it returns for an optimizer and a scheduler."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.prepare_arguments import PrepareRules
from accel_integrations.megatron.placeholders import MegatronLMDummyScheduler
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.public_names import known_as

RULES = PrepareRules(
    engine="Megatron-LM",
    reason="gives it other parameters",
    instead="Train the other one in a program of its own.",
    schedulers=(MegatronLMDummyScheduler,),
    takes_several=False,
)
"""What `prepare` takes with Megatron-LM."""


def names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer.

    Raises:
        ValueError: It has parameters that are not the model's, or has taken steps already.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names.get(one, "") for one in group["params"]] for group in optimizer.param_groups]
    if foreign := sum(name == "" for group in groups for name in group):
        raise ValueError(
            f"{foreign} parameters of the optimizer {type(optimizer).__name__} do not belong to the model "
            f"{type(model).__name__} that is prepared with it. Create the optimizer from model.parameters()."
        )
    if optimizer.state:
        raise ValueError(
            f"The optimizer {type(optimizer).__name__} has a state already, which belongs to parameters that Megatron-LM "
            "replaces. Prepare it before its first step; to continue a run, call load_state()."
        )
    return groups


def make_scheduler(dummy: MegatronLMDummyScheduler, optimizer: torch.optim.Optimizer, plugin: Any, count: int) -> Any:
    """The scheduler that a `MegatronLMDummyScheduler` stands for.

    Args:
        dummy: Has the number of steps, counted over all data-parallel processes.
        optimizer: The optimizer, of torch.
        plugin: Has the shape of the schedule, and perhaps its length.
        count: The number of data-parallel processes.

    Raises:
        ValueError: The length is not known, the warmup is given twice, or the shape is not one of Megatron-LM's.
    """
    plugin.set_scheduler_args(dummy)
    steps, style = plugin.lr_decay_iters or plugin.train_iters, plugin.lr_decay_style
    warmup = _warmup_steps(plugin, steps)
    if style not in DECAYS:
        raise ValueError(f"lr_decay_style={style!r} is not known. Choose one of {', '.join(map(repr, DECAYS))}.")
    highest = max(group["lr"] for group in optimizer.param_groups) or 1.0
    lowest = plugin.min_lr / highest

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if style == "inverse-square-root":
            return max(lowest, (max(warmup, 1) / max(step, 1)) ** 0.5)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return lowest + (1 - lowest) * DECAYS[style](done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step // count))


def _warmup_steps(plugin: Any, steps: int) -> float:
    """The steps of the warmup: `lr_warmup_iters`, or a fraction of the decay, which need not be whole, as in Megatron-LM."""
    fraction, warmup = plugin.lr_warmup_fraction, plugin.lr_warmup_iters or 0
    if fraction is None:
        return float(warmup)
    if warmup:
        raise ValueError(
            f"lr_warmup_fraction={fraction!r} and {warmup} warmup steps cannot be combined. Set lr_warmup_fraction of "
            "MegatronLMPlugin, or lr_warmup_iters, or warmup_num_steps of MegatronLMDummyScheduler."
        )
    return float(fraction * steps)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


DECAYS: dict[str, Any] = {
    "linear": lambda done: 1 - done,
    "cosine": _cosine,
    "constant": lambda done: 1.0,
    "inverse-square-root": None,
}
"""How much of the learning rate is left after a part of the decay, 0..1, by `lr_decay_style`."""


def to_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the parameters of the original model to the meta device after sharding; tied ones stay tied.

    Returns:
        Copies of the buffers that are part of its state dict, by name.
    """
    stored, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value.detach().cpu().clone() for name, value in stored.items() if name not in parameters}
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replacements:
                empty = torch.empty_like(parameter, device="meta")
                replacements[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = replacements[parameter]
    return buffers


@known_as("accelerate.utils.megatron_lm.MegatronLMOptimizerWrapper")
class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that takes its steps when a model in training is called.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the next call of the model does it."""

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the call of the model has taken the step."""

    def note_step(self, skipped: bool) -> None:
        """Take note of a step that the call of the model took, or `skipped`."""
        self._is_overflow = skipped

    @property
    @override
    def step_was_skipped(self) -> bool:
        return self._is_overflow or bool(getattr(self.optimizer, "skipped_iter", False))


@known_as("accelerate.utils.megatron_lm.MegatronLMSchedulerWrapper")
class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that steps when a model in training is called.

    Args:
        scheduler: The scheduler.
        optimizers: The prepared optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the call of the model has stepped the scheduler."""

    def step_after_optimizer(self) -> None:
        """Step as often as a run of one process would for the same data."""
        super().step()
