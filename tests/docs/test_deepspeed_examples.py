"""The DeepSpeed templates are filled by what the program prepares, and the program learns with one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from accel_integrations.engines.deepspeed.config import fill_auto_values
from accel_integrations.engines.deepspeed.prepare_arguments import check_fit
from accel_integrations.engines.engine import EngineContext
from accel_integrations.prepared.prepared import Prepared
from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.deepspeed_auto import AUTO, get_value, leaf_keys
from accel_state.settings.handlers import Handlers
from accelerate.utils import DummyOptim, DummyScheduler

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "deepspeed"


@pytest.mark.parametrize(
    ("name", "stage", "offloaded"),
    [
        ("zero1", 1, (None, None)),
        ("zero2", 2, (None, None)),
        ("zero2_offload", 2, ("cpu", None)),
        ("zero3", 3, (None, None)),
        ("zero3_offload", 3, ("cpu", "cpu")),
    ],
)
def test_templates_are_filled(name: str, stage: int, offloaded: tuple[Any, Any]) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=FOLDER / f"{name}.json")
    assert plugin.zero_stage == stage
    parts = ("offload_optimizer", "offload_param")
    assert tuple(plugin.get_value(f"zero_optimization.{part}.device") for part in parts) == offloaded
    plugin.set_mixed_precision("bf16")
    model = nn.Linear(4, 1)
    model.config = SimpleNamespace(hidden_size=8)  # type: ignore[assignment]
    optimizer = DummyOptim(model.parameters(), lr=0.5, weight_decay=0.25)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
    check_fit(optimizer, scheduler, plugin.deepspeed_config)
    context = EngineContext(
        SimpleNamespace(),  # type: ignore[arg-type]
        GradientState(GradientAccumulationPlugin(num_steps=3)),
        Handlers.sort(()),
        Prepared(),
        split_batches=False,
    )
    loader = DataLoader(range(64), batch_size=2)  # type: ignore[arg-type]
    fill_auto_values(plugin, context, [loader], model, optimizer, scheduler, 4, 4)
    config = plugin.deepspeed_config
    assert not [key for key in leaf_keys(config) if get_value(config, key) == AUTO]
    assert config["train_batch_size"] == 2 * 3 * 4
    assert config["optimizer"]["params"]["lr"] == config["scheduler"]["params"]["warmup_max_lr"] == 0.5


@pytest.mark.thorough
@pytest.mark.launch
def test_the_program_learns(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "2"]
    command += ["--config_file", str(FOLDER / "accelerate.yaml"), str(FOLDER / "train.py"), "--epochs", "2"]
    run = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_BUILD_SHM_COMM": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = re.findall(r"epoch \d: loss ([\d.]+), stage (\d)", run.stdout)
    assert [stage for _, stage in found] == ["2", "2"]
    assert float(found[1][0]) < float(found[0][0])
    assert (tmp_path / "model.safetensors").exists()
