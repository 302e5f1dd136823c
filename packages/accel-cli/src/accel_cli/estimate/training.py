"""The memory of a training step, measured by running one on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accel_cli.errors import UsageError
from accel_cli.estimate.batches import Batch
from accel_cli.estimate.live_memory import LiveMemory
from accel_cli.estimate.optimizers import make_optimizer_with_state
from accel_cli.estimate.training_report import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STEPPING,
    WEIGHT_COPIES,
    ModelStates,
    TrainingStep,
)
from accel_ops.dtypes import convert_to_fp32

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of the training step.

    Attributes:
        optimizer: A name in `optimizers.OPTIMIZERS`.
        mixed_precision: `"no"`, `"bf16"` or `"fp16"`, as in `Accelerator`.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        as_on_gpu: Whether to use GPU operations where they need other memory than those of the CPU.
    """

    optimizer: str = "adamw"
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    as_on_gpu: bool = True


def measure_fake(
    build: Callable[[], nn.Module],
    make_batch: Callable[[nn.Module], Batch] | None,
    settings: StepSettings,
) -> tuple[ModelStates, TrainingStep | None]:
    """Run a training step on fake tensors, and measure its memory.

    Args:
        build: Makes the model, in float32.
        make_batch: Makes a batch; without it, no step is run.
        settings: The settings of the step.

    Raises:
        ValueError: The step cannot run on fake tensors.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the reason is in our error, too
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        try:
            return measure(memory, build(), make_batch, settings)
        except UsageError:
            raise
        except Exception as error:  # any error of a model's code about fake tensors
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"A training step of this model cannot run on fake tensors ({type(error).__name__}: {reason}). "
                "Estimate without --training."
            ) from error


def measure(
    memory: LiveMemory,
    model: nn.Module,
    make_batch: Callable[[nn.Module], Batch] | None,
    settings: StepSettings,
) -> tuple[ModelStates, TrainingStep | None]:
    """Run a step and measure; as `measure_fake`, but with a model that was built inside `memory`."""
    model.train()
    if settings.gradient_checkpointing:
        enable_checkpointing(model)
    for kind, tensors in ((PARAMETERS, model.parameters()), (BUFFERS, model.buffers())):
        for tensor in tensors:
            memory.call(tensor, kind)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer_with_state(settings.optimizer, trainable, memory)
    states = ModelStates(
        parameters=memory.live.get(PARAMETERS, 0),
        buffers=memory.live.get(BUFFERS, 0),
        gradients=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        optimizer=memory.live.get(OPTIMIZER, 0),
    )
    if make_batch is None:
        return states, None
    batch = make_batch(model)
    with GpuOperations() if settings.as_on_gpu else nullcontext():
        return states, _step(memory, model, batch, optimizer, settings)


def _step(
    memory: LiveMemory, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, settings: StepSettings
) -> TrainingStep:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.call(p.grad, GRADIENTS))
    with memory.during(FORWARD) as forward:
        with _autocast(settings.mixed_precision):
            outputs = model(*batch.args, **batch.kwargs)
        if settings.mixed_precision != "no":
            outputs = convert_to_fp32(outputs)
        loss = batch.loss(outputs)
    with memory.during(BACKWARD) as backward:
        loss.backward()
    with memory.during(STEPPING) as stepping:
        optimizer.step()
    kept = forward.at_end
    return TrainingStep(kept.get(ACTIVATIONS, 0), kept.get(WEIGHT_COPIES, 0), (forward, backward, stepping))


def _autocast(mixed_precision: str) -> AbstractContextManager[Any]:
    if mixed_precision == "no":
        return nullcontext()
    return torch.autocast("cpu", dtype=AUTOCAST_DTYPES[mixed_precision])


def enable_checkpointing(model: Any) -> None:
    """Enable activation checkpointing in a model.

    Raises:
        UsageError: It does not support it.
    """
    kinds = {"use_reentrant": False, "preserve_rng_state": False}  # RNG states are not fake tensors
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # it is not supported together, with a warning
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kinds)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)
    elif hasattr(model, "set_grad_checkpointing"):  # timm
        model.set_grad_checkpointing(True)
    else:
        raise UsageError(
            f"{type(model).__name__} does not support activation checkpointing. Leave --gradient_checkpointing out."
        )


class GpuOperations(TorchFunctionMode):
    """Replaces operations by those that allocate as much memory as on a GPU, for fake tensors.

    - Dropout keeps a mask of one byte per value, not a tensor of the input's dtype.
    - Attention with dropout is fused, so that the matrix of attention weights is never allocated.
    - Autocast computes norms, softmax and losses in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation or its replacement."""
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


def _in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return operation(input, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return operation(input.float(), *args, **kwargs)

    return call


FLOAT32 = (
    F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.cosine_similarity, F.softplus,
)  # fmt: skip
REPLACED: dict[Any, Callable[..., Any]] = {
    **{operation: _in_float32(operation) for operation in FLOAT32},
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
