"""Offloading to NVMe at ZeRO stage 3, where libaio is installed: DeepSpeed builds its operations once, for some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state.libraries import is_installed

HAS_LIBAIO = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))

TRAINS = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from accelerate import Accelerator, DeepSpeedPlugin

device, folder = sys.argv[1:]
offload = {f"offload_{what}_device": device for what in ("optimizer", "param")}
if device == "nvme":
    offload |= {f"offload_{what}_nvme_path": folder for what in ("optimizer", "param")}
plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.0, **offload)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin)
torch.manual_seed(0)
# tensors below 1 MB stay in memory
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
inputs = torch.randn(64, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.utils.data.DataLoader(data, batch_size=16)
)
losses = []
for epoch in range(3):
    for values, targets in loader:
        loss = (model(values.bfloat16()).float() - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
swapped = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
print(json.dumps({"losses": losses, "swapped": swapped}))
accelerator.end_training()
"""


@pytest.mark.launch
@pytest.mark.thorough
@pytest.mark.skipif(not (HAS_LIBAIO and is_installed("deepspeed")), reason="needs DeepSpeed and libaio-dev")
def test_losses_are_those_of_a_run_in_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    results = {}
    for device in ("cpu", "nvme"):
        folder = tmp_path / device
        folder.mkdir()
        words = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "1", "train.py"]
        done = subprocess.run(
            [*words, device, str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        results[device] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"losses"')))
    assert results["nvme"]["losses"] == results["cpu"]["losses"]
    assert results["nvme"]["swapped"] > 3 * 4 * 1024**2, (
        "the float32 weights of the large layer, and Adam's two states of them"
    )
    assert results["cpu"]["swapped"] == 0
    losses = results["cpu"]["losses"]
    assert sum(losses[-4:]) < sum(losses[:4]), "the last epoch is better than the first"
