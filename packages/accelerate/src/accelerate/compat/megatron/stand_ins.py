"""Names of accelerate 1.15's module for Megatron-LM: those of the engine, and steps of its preparation that are gone."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_integrations.engines.megatron.model import MegatronEngine as MegatronEngine
from accel_integrations.engines.megatron.wrappers import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accel_integrations.engines.megatron.wrappers import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accel_integrations.megatron_dummies import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accel_integrations.megatron_dummies import MegatronLMDummyScheduler as MegatronLMDummyScheduler


def needs_megatron(what: str) -> NotImplementedError:
    """The error for a step that accelerate 1.15 takes with the package megatron.training.

    Args:
        what: The function, as the beginning of a sentence.

    Returns:
        The error, for the caller to raise.
    """
    return NotImplementedError(
        f"{what} needs megatron.training, which this library does not use: models are trained with megatron-core alone. Pass "
        "model, optimizer, scheduler and data loader to Accelerator.prepare()."
    )


def initialize(accelerator: Any, extra_args_provider: Any = None, args_defaults: Any = None) -> None:
    """Raise NotImplementedError: this would start Megatron-LM."""
    raise needs_megatron("initialize()")


def finish_mpu_init() -> None:
    """Make Megatron-LM's process groups."""
    raise needs_megatron("finish_mpu_init()")


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> nn.Module:
    """This rank's stage of a model of Megatron-LM."""
    raise needs_megatron("model_provider_func()")


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """A data loader for Megatron-LM."""
    raise needs_megatron("prepare_data_loader()")


def prepare_model_optimizer_scheduler(accelerator: Any) -> Any:
    """Megatron-LM's model, optimizer and scheduler."""
    raise needs_megatron("prepare_model_optimizer_scheduler()")


def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """An optimizer of Megatron-LM, wrapped."""
    raise needs_megatron("prepare_optimizer()")


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """A scheduler of Megatron-LM, wrapped."""
    raise needs_megatron("prepare_scheduler()")
