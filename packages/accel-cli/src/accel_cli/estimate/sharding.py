"""What each device holds when a training is spread over several.

The states of a model (parameters, gradients, optimizer) are divided as in ZeRO (Rajbhandari et al., arXiv:1910.02054,
section 5); what each device needs besides is in the rows of `PARALLEL`.
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
    """ZeRO lays all parameters end to end and cuts that into equal parts."""
    itemsize = max((size for _, size in shapes), default=0)
    return math.ceil(sum(math.prod(shape) for shape, _ in shapes) / num_devices) * itemsize


def _row_share(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    """FSDP 2 cuts each parameter along its first dimension; the first device has the largest part."""
    return sum(
        math.ceil(shape[0] / num_devices) * math.prod(shape[1:]) * itemsize if shape else itemsize
        for shape, itemsize in shapes
    )


def _matrix_share(shapes: tuple[ParameterShape, ...], num_devices: int) -> int:
    """Tensor parallelism cuts matrices; vectors (norms, biases) are whole on every device."""
    return sum(
        math.prod(shape) * itemsize // (num_devices if len(shape) > 1 else 1) for shape, itemsize in shapes
    )  # fmt: skip


Share = Callable[[tuple[ParameterShape, ...], int], int]


@dataclass(frozen=True, slots=True)
class ParallelRow:
    """One way of spreading a training.

    Attributes:
        title: For people.
        parameters: How much of the parameters each device holds.
        gradients: How much of the gradients.
        optimizer: How much of the optimizer's state.
        gathered_layers: How many whole layers each device holds for a while, each like the largest: one that
            computes, the next one arriving, and the gradients of one before they are divided.
        gradient_copies: Copies of the device's gradients for communication.
    """

    title: str
    parameters: Share = _whole
    gradients: Share = _whole
    optimizer: Share = _whole
    gathered_layers: int = 0
    gradient_copies: int = 0


PARALLEL: dict[str, ParallelRow] = {
    "ddp": ParallelRow("DDP", gradient_copies=1),  # the buckets that are summed
    "zero1": ParallelRow("ZeRO 1", optimizer=_flat_share),
    "zero2": ParallelRow("ZeRO 2", gradients=_flat_share, optimizer=_flat_share),
    "zero3": ParallelRow("ZeRO 3", _flat_share, _flat_share, _flat_share, gathered_layers=3),
    "fsdp": ParallelRow("FSDP", _row_share, _row_share, _row_share, gathered_layers=3),
    "tp": ParallelRow("tensor parallel", _matrix_share, _matrix_share, _matrix_share),
}


@dataclass(frozen=True, slots=True)
class PerDevice:
    """What one device holds, in bytes; the first one where the parts are not equal.

    Attributes:
        parallel: A name in `PARALLEL`.
        num_devices: How many there are.
        parameters: With buffers, which every device has.
        gradients: Of its part.
        optimizer: Of its part.
        communication: Gathered layers, and buffers for communication.
        activations: What forward keeps for backward; None when no step was taken.
        peak: The most at any time in a step; without a step, the sum of the rest.
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
    """Work out what each device holds.

    Args:
        parallel: A name in `PARALLEL`.
        num_devices: How many devices share the work; each has a batch of its own, but for `"tp"`.
        states: Of the whole model.
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
        # where the optimizer works on a part, its intermediate results are of that part
        fractions[WEIGHT_COPIES] = 0.0 if row.gathered_layers else 1.0  # made of each gathered layer, and let go of
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
