"""Comparing a checkpoint with a model by names and shapes, before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accel_bigmodel.tensors import is_quantised
from accel_bigmodel.weights.contents import CheckpointContents

EXTRA_STATE = "_extra_state"
SCALES = "SCB"  # the name under which bitsandbytes saves the scales of an 8-bit weight
ADDED_BY_BITSANDBYTES = (SCALES, "weight_format", "absmax", "quant_map", "nested_absmax", "nested_quant_map")
FILLED_BY_TORCH = "num_batches_tracked"  # missing in older checkpoints
COMPILED_PREFIX = "_orig_mod."  # of names in a child that was compiled: `layers.0._orig_mod.weight`
MOST_NAMES = 20

logger = logging.getLogger("accelerate.utils.modeling")


class CheckpointMismatchError(ValueError, RuntimeError):
    """A checkpoint does not match a model; torch raises a RuntimeError then, other loaders a ValueError."""


@dataclass(frozen=True)
class Difference:
    """How a checkpoint differs from a model.

    Args:
        source: The checkpoint, for messages.
        model: The model's class, for messages.
        missing: Names of the model that the checkpoint has not, not even under a tied name.
        unexpected: Names of the checkpoint that the model has not.
        misshapen: Name, shape in the checkpoint and shape in the model.
    """

    source: str
    model: str
    missing: list[str]
    unexpected: list[str]
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]]

    def check(self, strict: bool) -> None:
        """Raise an error for other shapes and, if strict, for missing or unexpected names; otherwise warn of names.

        Raises:
            CheckpointMismatchError: Listing all differences.
        """
        if self.misshapen or (strict and (self.missing or self.unexpected)):
            raise CheckpointMismatchError(
                f"The checkpoint {self.source} does not match {self.model}, which was left unchanged:\n"
                + self._report("not in the model, and not used")
            )
        if self.missing or self.unexpected:
            report = self._report("not in the model, and were not used when loading")
            logger.warning("The checkpoint %s does not fully match %s:\n%s", self.source, self.model, report)

    def _report(self, about_unexpected: str) -> str:
        shapes = [
            f"{name} {stored_shape} instead of {expected_shape}"
            for name, stored_shape, expected_shape in self.misshapen
        ]
        parts = {
            "missing, and left unchanged in the model": self.missing,
            about_unexpected: self.unexpected,
            "with another shape": shapes,
        }
        return "\n".join(f"  {len(names)} {what}: {_listed(names)}" for what, names in parts.items() if names)


def expected_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a checkpoint of a model holds, under all their names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with `get_extra_state`, by the name of that state in a state dict."""
    return {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def find_sources(tensors: dict[str, torch.Tensor], contents: CheckpointContents) -> dict[str, str]:
    """The name under which the checkpoint holds each tensor of a model: its own, or another name of a tied parameter.

    Args:
        tensors: What `expected_tensors` gave.
        contents: The checkpoint.

    Returns:
        Names in the checkpoint by names in the model; missing ones are left out.
    """
    plain = {name: name if name in contents else name.replace(COMPILED_PREFIX, "") for name in tensors}
    shared = {id(tensor): plain[name] for name, tensor in reversed(tensors.items()) if plain[name] in contents}
    sources = {name: plain[name] if plain[name] in contents else shared.get(id(tensors[name])) for name in tensors}
    return {name: source for name, source in sources.items() if source is not None}


def compare(model: nn.Module, contents: CheckpointContents) -> Difference:
    """Compare the tensors of a model with those of a checkpoint.

    Args:
        model: The model, which may be on the meta device.
        contents: The checkpoint.
    """
    tensors, extra = expected_tensors(model), extra_states(model)
    sources = find_sources(tensors, contents)
    used = set(sources.values())
    missing = [name for name, tensor in tensors.items() if name not in sources and not _is_filled_in(name, tensor)]
    missing += [name for name in extra if name not in contents]
    unexpected = [
        name
        for name in contents
        if name not in tensors and name not in used and name not in extra and not _describes_quantised(name, tensors)
    ]
    misshapen = []
    for name, source in sources.items():
        stored, tensor = contents.dtype_and_shape(source), tensors[name]
        if is_quantised(tensor) or nn.parameter.is_lazy(tensor):
            continue
        stored_shape = stored[1] if stored is not None else ()
        if stored_shape != tuple(tensor.shape):
            misshapen.append((name, stored_shape, tuple(tensor.shape)))
    return Difference(contents.source, type(model).__name__, missing, unexpected, misshapen)


def _is_filled_in(name: str, tensor: torch.Tensor) -> bool:
    return name.rpartition(".")[2] == FILLED_BY_TORCH and not tensor.is_meta


def _describes_quantised(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether it is what bitsandbytes saves beside a quantised weight."""
    owner, _, last = name.rpartition(".")
    weight = tensors.get(f"{owner}.weight") if last in ADDED_BY_BITSANDBYTES else None
    if weight is None:  # for 4-bit weights, the name begins with their own
        weight = tensors.get(owner) if last.startswith((*ADDED_BY_BITSANDBYTES, "quant_state")) else None
    return is_quantised(weight)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"
