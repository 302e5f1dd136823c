"""transformers' Trainer, which shards a model by torch_xla itself, for five steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.xla.running import devices, needs_torch_xla, results_of

pytestmark = [
    needs_torch_xla,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]


def test_the_trainer_with_xla_fsdp_v2(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = results_of("transformers_trainer.py", tmp_path / "plain", "--plain", USE_TORCH_XLA="0")
    actual = results_of("transformers_trainer.py", tmp_path, **devices(2))
    assert len(actual["losses"]) == 5
    assert actual["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert actual["device"] == "xla:0"
    assert actual["class"] == "SpmdFullyShardedDataParallel"
    assert actual["loader"] == "MpDeviceLoaderWrapper"
    assert all("devices=[" in spec for spec in actual["specs"].values())
    assert "model.safetensors" in actual["saved"]
