"""Training goes as with accelerate 1.15: losses, weights, learning rates, and what the accelerator says at every step."""

from __future__ import annotations

import pytest

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


@pytest.mark.parametrize("world", [1, 2])
def test_training_of_many_forms(world: int) -> None:
    named = {"* handler {'comm_hook': 'fp16'}": "a hook given by its name is used; 1.15 ignores it"}
    same("training", world=world, tolerance=1e-5, intended=named if world > 1 else {}, least=900)
