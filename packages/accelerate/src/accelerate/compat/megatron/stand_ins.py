"""Placeholders that a program passes to `Accelerator.prepare` for objects of Megatron-LM, and wrappers that it gets back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.public_names import known_as


def needs_megatron(what: str) -> NotImplementedError:
    """The error for a function that needs an engine for Megatron-LM.

    Args:
        what: The function or class, as the beginning of a sentence.

    Returns:
        The error, for the caller to raise.
    """
    return NotImplementedError(
        f"{what} needs the engine for Megatron-LM, which is not part of this release, as its package megatron.training is "
        "on no package index. Use ParallelismConfig for tensor, pipeline, context and sharded data parallelism."
    )


def function_that_needs_megatron(what: str) -> Callable[..., Any]:
    """A function that raises that error when it is called.

    Args:
        what: As for `needs_megatron`.
    """

    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise needs_megatron(what)

    return raise_error


@known_as("accelerate.utils.megatron_lm.MegatronLMDummyDataLoader")
class MegatronLMDummyDataLoader:
    """Placeholder for the data loaders that Megatron-LM builds from its indexed datasets.

    Args:
        dataset_kwargs: Megatron-LM's arguments about data.

    Attributes:
        dataset_args: The arguments, with `megatron_dataset_flag`.
    """

    dataset_args: dict[str, Any]

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Refuse: this needs Megatron-LM."""
        raise needs_megatron("MegatronLMDummyDataLoader.set_megatron_data_args()")

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Refuse: this needs Megatron-LM."""
        raise needs_megatron("MegatronLMDummyDataLoader.get_train_valid_test_datasets_provider()")

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """Refuse: this needs Megatron-LM."""
        raise needs_megatron("MegatronLMDummyDataLoader.build_train_valid_test_data_iterators()")


@known_as("accelerate.utils.megatron_lm.MegatronLMDummyScheduler")
class MegatronLMDummyScheduler:
    """Placeholder for the scheduler that Megatron-LM builds.

    Args:
        optimizer: The optimizer.
        total_num_steps (`int`, *optional*): Steps of the whole run.
        warmup_num_steps (`int`): Steps in which the learning rate rises.
        kwargs: Further settings.
    """

    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    kwargs: dict[str, Any]

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


@known_as("accelerate.utils.megatron_lm.MegatronLMOptimizerWrapper")
class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer of Megatron-LM, which takes its steps within `MegatronEngine.train_step`.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: Megatron-LM does it."""

    def step(self) -> None:  # type: ignore[override]
        """Do nothing: Megatron-LM does it."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were inf or NaN."""
        return bool(self.optimizer.skipped_iter)  # type: ignore[attr-defined]


@known_as("accelerate.utils.megatron_lm.MegatronLMSchedulerWrapper")
class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A scheduler of Megatron-LM, which steps within `MegatronEngine.train_step`.

    Args:
        scheduler: The scheduler.
        optimizers: The prepared optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Megatron-LM does it."""


@known_as("accelerate.utils.megatron_lm.MegatronEngine")
class MegatronEngine(nn.Module):
    """A model that Megatron-LM trains; creating one raises NotImplementedError.

    Args:
        accelerator: The accelerator.
        model: The model.
        optimizer: Its optimizer.
        scheduler: The scheduler of the optimizer.

    Attributes:
        module: The model, or the list of its virtual pipeline stages.
        base_model: The first of them.
        optimizer: Its optimizer.
        scheduler: The scheduler of the optimizer.
        train_step_handler: Computes the loss of a batch.
        module_config: Megatron-LM's settings about the model.
        iteration: How many steps were taken.
        num_floating_point_operations_so_far: Floating point operations of these steps.
        report_memory_flag: Whether the memory use is still to be logged.
        total_loss_dict: Sums of losses since they were last logged.
        eval_total_loss_dict: Likewise in evaluation.
    """

    module: Any
    base_model: Any
    optimizer: Any
    scheduler: Any
    train_step_handler: Any
    module_config: Any
    iteration: int
    num_floating_point_operations_so_far: int
    report_memory_flag: bool
    total_loss_dict: dict[str, Any]
    eval_total_loss_dict: dict[str, Any]

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        raise needs_megatron("MegatronEngine")

    def get_module_config(self) -> dict[str, Any]:
        """The configuration of the model's modules."""
        raise needs_megatron("MegatronEngine.get_module_config()")

    def train(self) -> Any:  # type: ignore[override]
        """Switch to training."""
        raise needs_megatron("MegatronEngine.train()")

    def eval(self) -> Any:
        """Switch to evaluation."""
        raise needs_megatron("MegatronEngine.eval()")

    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """Iterators over the micro-batches of a batch."""
        raise needs_megatron("MegatronEngine.get_batch_data_iterator()")

    def train_step(self, **batch_data: Any) -> Any:
        """Take a step."""
        raise needs_megatron("MegatronEngine.train_step()")

    def eval_step(self, **batch_data: Any) -> Any:
        """Compute the losses of an evaluation step."""
        raise needs_megatron("MegatronEngine.eval_step()")

    def forward(self, **batch_data: Any) -> Any:
        """Take a step, or compute losses."""
        raise needs_megatron("MegatronEngine.forward()")

    def log_eval_results(self) -> None:
        """Log the losses of an evaluation."""
        raise needs_megatron("MegatronEngine.log_eval_results()")

    def save_checkpoint(self, output_dir: Any) -> None:
        """Write a checkpoint."""
        raise needs_megatron("MegatronEngine.save_checkpoint()")

    def load_checkpoint(self, input_dir: Any) -> None:
        """Read a checkpoint."""
        raise needs_megatron("MegatronEngine.load_checkpoint()")


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
