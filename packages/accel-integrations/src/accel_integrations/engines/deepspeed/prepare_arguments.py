"""What DeepSpeed takes in `prepare`, and whether model, optimizer and scheduler fit the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from accel_integrations.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_integrations.engines.prepare_arguments import PrepareRules
from accel_state.errors import missing_library
from accel_state.libraries import is_deepspeed_available
from accel_state.settings.deepspeed_auto import get_value


@dataclass(frozen=True)
class _Row:
    """An optimizer of DeepSpeed, and the names of those that it replaces."""

    replaces: tuple[str, ...]
    module: str
    name: str
    settings: tuple[str, ...]


CPU_OPTIMIZERS = (
    _Row(("Adagrad",), "deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", ("eps",)),
    _Row(("Adam", "AdamW"), "deepspeed.ops.adam", "DeepSpeedCPUAdam", ("betas", "eps")),
    _Row(("Lion",), "deepspeed.ops.lion", "DeepSpeedCPULion", ("betas",)),
)

NOT_KNOWN = ("amsgrad", "maximize", "differentiable")
"""Options of PyTorch's optimizers that DeepSpeed's do not have."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """The CPU optimizer of DeepSpeed with the parameter groups and options of one of PyTorch.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion; another one comes back as it is.

    Raises:
        MissingLibraryError: Without DeepSpeed.
        ValueError: For an option that DeepSpeed's does not have, such as `amsgrad`.
    """
    if not is_deepspeed_available():
        raise missing_library("deepspeed", "deepspeed", "map_pytorch_optim_to_deepspeed()")
    name = type(optimizer).__name__
    counterpart = next((row for row in CPU_OPTIMIZERS if name in row.replaces), None)
    if counterpart is None:
        return optimizer
    lost = [name for name in NOT_KNOWN if any(group.get(name) for group in optimizer.param_groups)]
    if lost:
        raise ValueError(
            f"{name}({', '.join(f'{one}=True' for one in lost)}) has no counterpart in {counterpart.module}.{counterpart.name}, "
            "which keeps the optimizer state in CPU memory. Leave it out, set zero_force_ds_cpu_optimizer to false in "
            "the DeepSpeed configuration, or do not offload the optimizer."
        )
    kind: Any = getattr(import_module(counterpart.module), counterpart.name)
    settings = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", *counterpart.settings)}
    if counterpart.name == "DeepSpeedCPUAdam":
        settings["adamw_mode"] = name == "AdamW"
    return kind(optimizer.param_groups, **settings)


OF_DEEPSPEED = frozenset({"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
"""Schedulers of DeepSpeed, which its engine steps; they are not `LRScheduler`s."""


RULES = PrepareRules(
    engine="a DeepSpeed engine",
    reason="is built from both",
    instead="Create one Accelerator for each model, and prepare them separately.",
    optimizers=(DummyOptim,),
    schedulers=(DummyScheduler,),
    scheduler_names=OF_DEEPSPEED,
)
"""What `prepare` takes with DeepSpeed."""


def check_model_and_optimizer(model: nn.Module, optimizer: Any, config: Mapping[str, Any]) -> None:
    """Check that a model comes with its optimizer where ZeRO shards optimizer states, and that the two belong together.

    Args:
        model: The model.
        optimizer: The optimizer prepared with it, if any.
        config: The DeepSpeed configuration.

    Raises:
        ValueError: They do not; the message says what to pass instead.
    """
    stage = get_value(config, "zero_optimization.stage", 0)
    if optimizer is None and stage in (1, 2) and "optimizer" not in config:
        raise ValueError(
            f"prepare() got the model {type(model).__name__} without an optimizer, but ZeRO stage {stage} shards the "
            "optimizer's state. Pass both to one call of prepare(). For inference only, choose stage 3 or 0."
        )
    if stage == 0 or not isinstance(optimizer, torch.optim.Optimizer):
        return
    parameter_ids = {id(one) for one in model.parameters()}
    num_foreign = sum(id(one) not in parameter_ids for group in optimizer.param_groups for one in group["params"])
    if num_foreign:
        raise ValueError(
            f"{num_foreign} parameters of the optimizer {type(optimizer).__name__} do not belong to the model "
            f"{type(model).__name__} that is prepared with it. Create the optimizer from model.parameters()."
        )


def check_fit(optimizer: Any, scheduler: Any, config: Mapping[str, Any]) -> None:
    """Check that optimizer and scheduler are each defined once: by an object or by the configuration.

    Args:
        optimizer: The optimizer to prepare, if any.
        scheduler: The scheduler to prepare, if any.
        config: The DeepSpeed configuration.

    Raises:
        ValueError: One is defined twice or not at all; the message says what to change.
    """
    for kind, item, dummy in (("optimizer", optimizer, DummyOptim), ("scheduler", scheduler, DummyScheduler)):
        if item is None:
            continue
        is_dummy, is_described = isinstance(item, dummy), kind in config
        if is_described and not is_dummy:
            raise ValueError(
                f"The {kind} is given twice: the DeepSpeed configuration has a section {kind!r}, and prepare() got a "
                f"{type(item).__name__}. Remove the section, or pass accelerate.utils.{dummy.__name__} instead."
            )
        if is_dummy and not is_described and getattr(item, "lr_scheduler_callable", None) is None:
            instead = ", or pass lr_scheduler_callable to it" if dummy is DummyScheduler else ""
            raise ValueError(
                f"prepare() got a {dummy.__name__}, which stands for the {kind} of the DeepSpeed configuration, but it "
                f"has no section {kind!r}. Add one, or pass a real {kind}{instead}."
            )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise ValueError(
            f"prepare() got a DummyOptim together with the scheduler {type(scheduler).__name__}, but the optimizer of "
            "that scheduler is created by DeepSpeed only now. Pass a DummyScheduler, with a section 'scheduler' in the "
            "configuration or with lr_scheduler_callable."
        )
