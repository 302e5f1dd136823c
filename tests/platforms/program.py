"""Trains, tracks, saves, loads and offloads, in each process of a launch; prints what came of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from accel_state.process_ids import exists
from accelerate import Accelerator, disk_offload
from accelerate.utils import ProjectConfiguration, set_seed

folder = Path(sys.argv[1])
set_seed(3)
accelerator = Accelerator(
    log_with="local", project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
)
accelerator.init_trackers("a run", config={"lr": 0.1})
dataset = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()})
accelerator.register_save_state_pre_hook(
    lambda models, weights, output: Path(output, "extra.txt").write_text("a hook")
)
checkpoint = accelerator.save_state()
accelerator.save_state(async_save=True).result()
trained = [parameter.detach().clone() for parameter in model.parameters()]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
accelerator.load_state(checkpoint)
assert all(map(torch.equal, trained, model.parameters()))
accelerator.save_model(model, folder / "model")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    plain.load_state_dict({name.removeprefix("module."): value for name, value in model.state_dict().items()})
    expected = plain(dataset.tensors[0])
    disk_offload(plain, folder / "offloaded", execution_device=torch.device("cpu"))
    assert torch.equal(plain(dataset.tensors[0]), expected)
assert exists(os.getpid())
assert not exists(2**22 + 1)  # more than Linux gives
accelerator.end_training()
sys.stdout.write(f"rank {accelerator.process_index} on {sys.platform} trained {len(loader)} batches\n")
