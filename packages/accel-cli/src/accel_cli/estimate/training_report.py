"""What is known about the memory of a training step. Free of torch, for those who only print it."""

from __future__ import annotations

from dataclasses import dataclass, field

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
WEIGHT_COPIES = "weight copies"  # in half precision, made by autocast
ACTIVATIONS = "activations"  # with everything else that comes and goes

FORWARD = "forward pass"
BACKWARD = "backward pass"
STEPPING = "optimizer step"


@dataclass(slots=True)
class Phase:
    """A part of a training step.

    Attributes:
        name: What happens in it.
        at_peak: Kind of memory -> bytes at the moment when the sum was largest.
        at_end: The same when it was over.
    """

    name: str
    at_peak: dict[str, int] = field(default_factory=dict)
    at_end: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The largest sum."""
        return sum(self.at_peak.values())


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What lasts from step to step.

    Attributes:
        shapes: Shape of each parameter and bytes per value; tied ones once.
        largest_layer_bytes: Parameters and buffers of the largest layer.
        parameters: Bytes of all parameters.
        buffers: Bytes of all buffers.
        gradients: Bytes of the gradients of the parameters that are trainable.
        optimizer: Bytes of the optimizer's state.
    """

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    largest_layer_bytes: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Memory of one step of a training that is under way, in bytes.

    Attributes:
        activations: What the forward pass keeps for the backward pass, with inputs and outputs.
        weight_copies: Parameters in the dtype that is computed in, where that is another one.
        phases: Forward, backward and optimizer step, each with its peak.
    """

    activations: int
    weight_copies: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The part of the step that needs most."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)
