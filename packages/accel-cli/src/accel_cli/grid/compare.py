"""Compares the figures of a configuration with those of one process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-5
SMALL = 1e-2  # of the whole update: a parameter that hardly changes is compared with this share of it
ULP = 2.0**-23  # float32


@dataclass(frozen=True, slots=True)
class GridRun:
    """What the ranks of a configuration recorded.

    Attributes:
        losses: For each step, the loss over all ranks, averaged as gradients are.
        norms: For each step, the gradient norm on each rank.
        updates: For each step, by how much every parameter changed.
        sizes: The norm of every parameter.
        facts: What the script did.
    """

    losses: list[float]
    norms: list[list[float]]
    updates: list[dict[str, Any]]
    sizes: dict[str, float]
    facts: dict[str, Any]


@dataclass(slots=True)
class Comparison:
    """How far a configuration is from one process.

    Attributes:
        errors: The largest relative difference of each figure over all steps.
        reason: The first difference above the tolerance, in a sentence; empty if there is none.
    """

    errors: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "norm": 0.0, "update": 0.0})
    reason: str = ""

    def note(self, figure: str, error: float, sentence: str) -> None:
        """Note one difference.

        Args:
            figure: The key in `errors`.
            error: Relative; NaN counts as infinite.
            sentence: The reason, without its end.
        """
        error = math.inf if math.isnan(error) else error
        self.errors[figure] = max(self.errors[figure], error)
        if error > TOLERANCE and not self.reason:
            self.reason = f"{sentence}, a relative difference of {error:.1e}"


def read_facts(folder: str) -> list[dict[str, Any]]:
    """What each rank wrote, in the order of ranks; those that wrote nothing are left out."""
    paths = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    facts = []
    for path in paths:
        with open(os.path.join(folder, path), encoding="utf-8") as file:
            facts.append(json.load(file))
    return facts


def read_run(folder: str) -> GridRun:
    """Read the records of all ranks."""
    from accel_ops.files.serialization import load

    ranks = read_facts(folder)
    # ranks that took more steps than others: those that all took are compared, and their number is the difference
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=False))
    tensors = load(os.path.join(folder, "updates.pt"))
    return GridRun(
        losses=[sum(one["loss"] for one in step) / (sum(one["weight"] for one in step) or math.nan) for step in steps],
        norms=[[one["norm"] for one in step] for step in steps],
        updates=tensors["updates"],
        sizes=tensors["norms"],
        facts=ranks[0],
    )


def compare(run: GridRun, reference: GridRun) -> Comparison:
    """Compare all steps: losses, then gradient norms, then updates, so that the reason is what went wrong first."""
    result = Comparison()
    if len(run.losses) != len(reference.losses):
        result.reason = f"it took {len(run.losses)} optimizer steps, and one process took {len(reference.losses)}"
    for index, (loss, norms) in enumerate(zip(run.losses, run.norms, strict=True)):
        if index == len(reference.losses):
            break
        at = f"of step {index + 1}"
        expected = reference.losses[index]
        result.note("loss", _relative(loss, expected), f"the loss {at} is {loss:.6g} instead of {expected:.6g}")
        expected = reference.norms[index][0]
        norm = max(norms, key=lambda norm: _relative(norm, expected))
        result.note(
            "norm", _relative(norm, expected), f"the gradient norm {at} is {norm:.6g} instead of {expected:.6g}"
        )
        for name, error in _update_errors(run.updates[index], reference.updates[index], reference.sizes):
            result.note("update", error, f"the update {at} differs in {name}")
    return result


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected) if expected else abs(value)


def _update_errors(
    update: dict[str, Any], expected: dict[str, Any], sizes: dict[str, float]
) -> Iterator[tuple[str, float]]:
    """For each parameter, the relative difference of its update, beyond what its values round off in float32."""
    whole = math.hypot(*(float(tensor.norm()) for tensor in expected.values()))
    for name, tensor in expected.items():
        if name not in update or update[name].shape != tensor.shape:
            yield name, math.inf
            continue
        beyond = float((update[name] - tensor).norm()) - ULP * sizes[name]
        scale = max(float(tensor.norm()), SMALL * whole) or 1.0
        yield name, 0.0 if beyond <= 0 else beyond / scale
