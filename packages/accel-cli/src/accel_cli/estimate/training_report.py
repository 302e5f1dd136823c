"""The measured memory of a training step. Does not import torch, for code that only prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
WEIGHT_COPIES = "weight copies"  # in half precision, made by autocast
ACTIVATIONS = "activations"  # with all other temporary tensors

FORWARD = "forward pass"
BACKWARD = "backward pass"
STEPPING = "optimizer step"


@dataclass(slots=True)
class Phase:
    """One phase of a training step.

    Attributes:
        name: Its name.
        at_peak: Kind of memory -> bytes at the peak.
        at_end: The same at the end of the phase.
    """

    name: str
    at_peak: dict[str, int] = field(default_factory=dict)
    at_end: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The peak memory in bytes."""
        return sum(self.at_peak.values())


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The memory that persists from step to step.

    Attributes:
        parameters: Bytes of all parameters.
        buffers: Bytes of all buffers.
        gradients: Bytes of the gradients of the parameters that are trainable.
        optimizer: Bytes of the optimizer's state.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The memory of one training step after the first, in bytes.

    Attributes:
        activations: Kept by the forward pass for the backward pass, with inputs and outputs.
        weight_copies: Parameters cast to the autocast dtype.
        phases: Forward pass, backward pass and optimizer step, each with its peak.
    """

    activations: int
    weight_copies: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)
