"""A run that one library saved goes on with the other as if it had never stopped, in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.differential.running import REFERENCE, Recorded, compare, needs_reference, recorded

pytestmark = needs_reference


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", ["1.15 to ours", "ours to 1.15"])
def test_runs_go_on(tmp_path: Path, way: str, world: int) -> None:
    writer, reader = (REFERENCE, sys.executable) if way == "1.15 to ours" else (sys.executable, REFERENCE)
    saved = recorded(writer, "checkpoints", "save", str(tmp_path), world=world)
    loaded = recorded(reader, "checkpoints", "load", str(tmp_path), world=world)
    compare(resumable(loaded), resumable(saved), tolerance=1e-6, least=60)
    itself = recorded(writer, "checkpoints", "load", str(tmp_path), world=world)
    compare(loaded, itself, tolerance=1e-6, least=90)


def resumable(seen: Recorded) -> Recorded:
    """Without the runs whose order of samples 1.15 does not save: a generator of the user's own starts again."""
    return {key: value for key, value in seen.items() if "going on" not in key[1] or "seedable=True" in key[1]}
