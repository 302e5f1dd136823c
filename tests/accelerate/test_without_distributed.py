"""Builds of torch without torch.distributed: one process trains, saves, loads and places models all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "support" / "without_distributed"
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list, set_seed

assert not dist.is_available()
set_seed(0)
accelerator = Accelerator(
    cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, kwargs_handlers=[InitProcessGroupKwargs()],
    project_config=ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True),
)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for inputs in loader:
    with accelerator.accumulate(model), accelerator.autocast():
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
gathered = accelerator.gather_for_metrics(loss), accelerator.reduce(loss, "mean"), accelerator.gather_for_metrics(["a"])
assert gathered[2] == ["a"]
assert broadcast_object_list(["b"]) == ["b"]
with accelerator.split_between_processes([1, 2]) as mine, accelerator.main_process_first():
    assert mine == [1, 2]
weight = accelerator.unwrap_model(model).weight.detach().clone()
folder = accelerator.save_state()
with torch.no_grad():
    accelerator.unwrap_model(model).weight.zero_()
accelerator.load_state(folder)
assert torch.equal(accelerator.unwrap_model(model).weight, weight)
accelerator.save_model(model, sys.argv[1] + "/model")
accelerator.wait_for_everyone()
accelerator.end_training()
with init_empty_weights():
    empty = torch.nn.Linear(4, 1)
placed = load_checkpoint_and_dispatch(empty, sys.argv[1] + "/model", device_map={"": "cpu"})
assert torch.equal(placed.weight, weight)
print("trained")
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(BUILD), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.takes_turns("other machines")
def test_one_process_trains_saves_and_loads(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = run("-W", "error", str(program), str(tmp_path / "alone"))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    launched = run("-m", "accelerate.commands.launch", "--cpu", str(program), str(tmp_path / "launched"))
    assert (launched.returncode, launched.stdout) == (0, "trained\n"), launched.stderr


@pytest.mark.takes_turns("other machines")
@pytest.mark.launch
def test_two_processes_say_what_is_missing() -> None:
    code = "from accelerate import PartialState; PartialState(cpu=True)"
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    done = run("-c", code)
    assert done.returncode == 1
    assert "built without torch.distributed" in done.stderr.splitlines()[-1]
