"""Programs chosen by chance do the same with both libraries.

The seeds are always the same ones, unless `DIFFERENTIAL_SEED` says from which one on to look for more.
"""

from __future__ import annotations

import os

import pytest

from tests.differential.running import needs_reference, same

pytestmark = needs_reference
FIRST = os.environ.get("DIFFERENTIAL_SEED", "0")


@pytest.mark.parametrize("world", [1, 2])
def test_training(world: int) -> None:
    same("random_training", FIRST, "60", world=world, tolerance=2e-3, least=60)


@pytest.mark.parametrize("world", [1, 2])
def test_loaders(world: int) -> None:
    same("random_loaders", FIRST, "400", world=world, least=400)
