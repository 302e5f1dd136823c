"""Files that programs write themselves, as `training_args.bin` of transformers, are read by the other library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.differential.running import REFERENCE, compare, needs_reference, recorded

pytestmark = needs_reference


@pytest.mark.parametrize("way", ["1.15 to ours", "ours to 1.15"])
def test_objects_come_back(tmp_path: Path, way: str) -> None:
    writer, reader = (REFERENCE, sys.executable) if way == "1.15 to ours" else (sys.executable, REFERENCE)
    recorded(writer, "pickles", "save", str(tmp_path))
    itself = recorded(writer, "pickles", "load", str(tmp_path))
    assert not [case for case, seen in itself.items() if isinstance(seen, dict) and "raises" in seen]
    compare(recorded(reader, "pickles", "load", str(tmp_path)), itself, least=180)
