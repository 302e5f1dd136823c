"""Memory per device of sharded and replicated training.

The states of a model (parameters, gradients, optimizer) are sharded as in ZeRO (Rajbhandari et al., arXiv:1910.02054,
section 5); further memory of each device is in the rows of `PARALLEL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from accel_cli.estimate.training_report import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STEPPING,
    WEIGHT_COPIES,
    ModelStates,
    TrainingStep,
)

ParameterShape = tuple[tuple[int, ...], int]  # shape and bytes per value


def _whole(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    return sum(math.prod(shape) * itemsize for shape, itemsize in shapes)


def _flat_share(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    """ZeRO flattens and concatenates all parameters, and shards the result evenly."""
    itemsize = max((size for _, size in shapes), default=0)
    return math.ceil(sum(math.prod(shape) for shape, _ in shapes) / num_devices) * itemsize


def _row_share(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    """FSDP 2 shards each parameter along its first dimension; the first device has the largest shard."""
    return sum(
        math.ceil(shape[0] / num_devices) * math.prod(shape[1:]) * itemsize if shape else itemsize
        for shape, itemsize in shapes
    )


def _matrix_share(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    """Tensor parallelism shards matrices; vectors (norms, biases) are replicated."""
    return sum(
        math.prod(shape) * itemsize // (num_devices if len(shape) > 1 else 1) for shape, itemsize in shapes
    )  # fmt: skip


Share = Callable[[tuple[ParameterShape, ...], int], int]


@dataclass(frozen=True, slots=True)
class ParallelRow:
    """One kind of parallelism.

    Attributes:
        title: Its name in the report.
        parameters: Bytes of parameters on each device.
        gradients: Bytes of gradients on each device.
        optimizer: Bytes of optimizer state on each device.
        gathered_layers: How many unsharded layers each device holds at a time, each of the largest size: the one that
            computes, the one being prefetched, and the gradients of one before the reduce-scatter.
        gradient_copies: Copies of the device's gradients for communication.
    """

    title: str
    parameters: Share = _whole
    gradients: Share = _whole
    optimizer: Share = _whole
    gathered_layers: int = 0
    gradient_copies: int = 0


PARALLEL: dict[str, ParallelRow] = {
    "ddp": ParallelRow("DDP", gradient_copies=1),  # the buckets of the all-reduce
    "zero1": ParallelRow("ZeRO 1", optimizer=_flat_share),
    "zero2": ParallelRow("ZeRO 2", gradients=_flat_share, optimizer=_flat_share),
    "zero3": ParallelRow("ZeRO 3", _flat_share, _flat_share, _flat_share, gathered_layers=3),
    "fsdp": ParallelRow("FSDP", _row_share, _row_share, _row_share, gathered_layers=3),
    "tp": ParallelRow("tensor parallel", _matrix_share, _matrix_share, _matrix_share),
}


@dataclass(frozen=True, slots=True)
class PerDevice:
    """Memory of one device, in bytes; of the first one where shards are not equal.

    Attributes:
        parallel: A name in `PARALLEL`.
        num_devices: The number of devices.
        parameters: Its shard of the parameters, and all buffers.
        gradients: Its shard of the gradients.
        optimizer: Its shard of the optimizer state.
        communication: Gathered layers, and buffers for communication.
        activations: Kept by the forward pass for the backward pass; None without a step.
        peak: The peak memory of a step; without a step, the sum of the rest.
    """

    parallel: str
    num_devices: int
    parameters: int
    gradients: int
    optimizer: int
    communication: int
    activations: int | None
    peak: int


def per_device(parallel: str, num_devices: int, states: ModelStates, step: TrainingStep | None) -> PerDevice:
    """Compute the memory of each device.

    Args:
        parallel: A name in `PARALLEL`.
        num_devices: The number of devices; each has its own batch, except for `"tp"`.
        states: Of the full model.
        step: A step on one device with the batch of one device.
    """
    row = PARALLEL[parallel]
    fractions = {
        PARAMETERS: _fraction(row.parameters, states, num_devices),
        GRADIENTS: _fraction(row.gradients, states, num_devices),
        OPTIMIZER: _fraction(row.optimizer, states, num_devices),
    }
    parameters = round(states.parameters * fractions[PARAMETERS]) + states.buffers
    gradients = round(states.gradients * fractions[GRADIENTS])
    optimizer = round(states.optimizer * fractions[OPTIMIZER])
    communication = 0
    if num_devices > 1:
        communication = row.gathered_layers * states.largest_layer_bytes + row.gradient_copies * gradients
    peak = parameters + gradients + optimizer + communication
    if step is not None:
        # where the optimizer updates a shard, its intermediate results have the size of the shard
        fractions[WEIGHT_COPIES] = (
            0.0 if row.gathered_layers else 1.0
        )  # made of each gathered layer, and freed with it
        own = {STEPPING: fractions[OPTIMIZER]}
        peak = max(
            round(
                sum(
                    num_bytes * fractions.get(kind, own.get(phase.name, 1.0) if kind == ACTIVATIONS else 1.0)
                    for kind, num_bytes in phase.at_peak.items()
                )
            )
            + (communication if phase.name != STEPPING or row.gradient_copies else 0)
            for phase in step.phases
        )
    return PerDevice(
        parallel, num_devices, parameters, gradients, optimizer, communication,
        None if step is None else step.activations, peak,
    )  # fmt: skip


def _fraction(share: Share, states: ModelStates, num_devices: int) -> float:
    whole = _whole(states.shapes, num_devices)
    return share(states.shapes, num_devices) / whole if whole else 1.0
