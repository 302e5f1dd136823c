"""The memory of a training step, found by taking one with tensors that have no values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_cli.errors import UsageError
from accel_cli.estimate.batches import Batch
from accel_cli.estimate.gpu_operations import GpuOperations
from accel_cli.estimate.live_memory import LiveMemory
from accel_cli.estimate.optimizers import make_optimizer
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
    """How the step is taken.

    Attributes:
        optimizer: A name in `optimizers.OPTIMIZERS`.
        mixed_precision: `"no"`, `"bf16"` or `"fp16"`, as in `Accelerator`.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        as_on_gpu: Use the operations of a GPU where they need other memory than those of the CPU.
    """

    optimizer: str = "adamw"
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    as_on_gpu: bool = True


def measure_fake(
    build: Callable[[], nn.Module],
    make_batch: Callable[[nn.Module], Batch] | None,
    settings: StepSettings,
    largest_layer_bytes: int,
) -> tuple[ModelStates, TrainingStep | None]:
    """Take a step without values, and count.

    Args:
        build: Makes the model, in float32.
        make_batch: Makes what it is trained with; no step is taken without it.
        settings: How the step is taken.
        largest_layer_bytes: Of the model; only noted.

    Raises:
        ValueError: The step cannot be taken without values, and why.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the reason is in our error, too
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        try:
            return measure(memory, build(), make_batch, settings, largest_layer_bytes)
        except UsageError:
            raise
        except Exception as error:  # whatever the code of a model makes of tensors without values
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"A training step of this model cannot be taken without values ({type(error).__name__}: {reason}): "
                "estimate without --training"
            ) from error


def measure(
    memory: LiveMemory,
    model: nn.Module,
    make_batch: Callable[[nn.Module], Batch] | None,
    settings: StepSettings,
    largest_layer_bytes: int,
) -> tuple[ModelStates, TrainingStep | None]:
    """Take a step and count; as `measure_fake`, but with a model that was made inside `memory`."""
    model.train()
    if settings.gradient_checkpointing:
        enable_checkpointing(model)
    for kind, tensors in ((PARAMETERS, model.parameters()), (BUFFERS, model.buffers())):
        for tensor in tensors:
            memory.call(tensor, kind)
    optimizer = make_optimizer(settings.optimizer, [p for p in model.parameters() if p.requires_grad], memory)
    states = ModelStates(
        shapes=tuple((tuple(p.shape), p.element_size()) for p in model.parameters()),
        largest_layer_bytes=largest_layer_bytes,
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
    """Have a model compute activations again in the backward pass.

    Raises:
        UsageError: It cannot.
    """
    kinds = {"use_reentrant": False, "preserve_rng_state": False}  # random states have values
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # goes with it, and saves a warning
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kinds)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)
    elif hasattr(model, "set_grad_checkpointing"):  # timm
        model.set_grad_checkpointing(True)
    else:
        raise UsageError(f"{type(model).__name__} has no gradient checkpointing: leave --gradient_checkpointing out")
