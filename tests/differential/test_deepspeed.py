"""DeepSpeed is filled, trains and stores as with accelerate 1.15; each goes on from what the other saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.differential.running import REFERENCE, compare, needs_reference, recorded, same

pytest.importorskip("deepspeed")
pytestmark = needs_reference


@pytest.fixture(autouse=True, scope="module")
def reference_has_deepspeed() -> None:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    if subprocess.run([REFERENCE, "-c", look], check=False).returncode:
        pytest.skip("the environment of accelerate 1.15 lacks deepspeed: remove it, and it is made again with it")


def test_configurations_losses_norms_and_weights() -> None:
    named = {
        "filled text config": "the width of a model with a text_config is found; 1.15 refuses it",
        "engine text config": "likewise",
    }
    same("deepspeed_training", "train", world=2, tolerance=1e-5, intended=named, least=90)


@pytest.mark.parametrize("way", ["1.15 to ours", "ours to 1.15"])
def test_runs_go_on(tmp_path: Path, way: str) -> None:
    writer, reader = (REFERENCE, sys.executable) if way == "1.15 to ours" else (sys.executable, REFERENCE)
    saved = recorded(writer, "deepspeed_training", "save", str(tmp_path), world=2)
    loaded = recorded(reader, "deepspeed_training", "load", str(tmp_path), world=2)
    compare(loaded, saved, tolerance=1e-6, least=20)
