"""A signal ends a run at its next step boundary, with a checkpoint from which the same command continues it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tests.support.output import own_lines

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

set_seed(3)
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, save_on_signals="SIGTERM")
continues = DataLoaderConfiguration(use_stateful_dataloader=True)
accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project, dataloader_config=continues)
model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(range(20), 2, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.resume()
done = 0
for epoch in range(loader.iteration, 3):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float().unsqueeze(1)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        done += 1
        if done == int(sys.argv[2]) and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
    with torch.no_grad():
        for batch in accelerator.prepare(DataLoader(range(8), 2)):  # nothing is saved in an evaluation
            model(batch.float().unsqueeze(1))
weights = accelerator.get_state_dict(model)
accelerator.print({name: value.tolist() for name, value in weights.items()})
"""


ENGINES = {
    "fsdp": ["--use_fsdp", "--fsdp_version", "1", "--fsdp_state_dict_type", "SHARDED_STATE_DICT"],
    "fsdp2": ["--use_fsdp", "--fsdp_version", "2"],
    "zero2": ["--use_deepspeed", "--zero_stage", "2", "--gradient_accumulation_steps", "2"],
}


def run(folder: Path, world: int, steps: int, engine: str = "") -> subprocess.CompletedProcess[str]:
    """The script, which gets SIGTERM on its last rank after some steps."""
    script = folder.parent / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(world)]
    launcher += ENGINES.get(engine, [])
    command = [*launcher, str(script), str(folder), str(steps)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def check(world: int, steps: int, folder: Path, engine: str = "") -> None:
    """A run that is asked to end after some steps, and started again, ends as one that was left alone."""
    whole = run(folder / "whole", world, 1000, engine)
    assert whole.returncode == 0, whole.stderr
    stopped = run(folder / "run", world, steps, engine)
    assert stopped.returncode == 75, stopped.stderr
    assert "accelerator.resume() continues from there" in stopped.stderr
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["checkpoint_0"]
    resumed = run(folder / "run", world, 1000, engine)
    assert resumed.returncode == 0, resumed.stderr
    assert own_lines(resumed.stdout) == own_lines(whole.stdout)


@pytest.mark.parametrize(("world", "steps"), [(1, 7), pytest.param(2, 5, marks=pytest.mark.thorough)])
def test_the_same_command_continues_as_if_nothing_had_been(world: int, steps: int, tmp_path: Path) -> None:
    check(world, steps, tmp_path)  # within a window, and at the end of an epoch


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_models_and_optimizers_that_are_sharded(engine: str, tmp_path: Path) -> None:
    if engine == "zero2":
        pytest.importorskip("deepspeed")
    check(2, 6, tmp_path, engine)  # within a window, which FSDP 1 and DeepSpeed end before they save


def test_there_is_nothing_to_resume_at_first(tmp_path: Path) -> None:
    assert Accelerator(cpu=True, project_dir=tmp_path).resume() is False
    with pytest.raises(ValueError, match=r"resume\(\) needs to know where checkpoints are"):
        Accelerator(cpu=True).resume()


@pytest.mark.parametrize("wrong", ["SIGKILL", "TERM", ("SIGTERM", "SIGNONE"), 15])
def test_signals_that_cannot_be_handled(wrong: object) -> None:
    with pytest.raises(ValueError, match="save_on_signals=.*expected names of signals"):
        ProjectConfiguration("run", save_on_signals=wrong)  # type: ignore[arg-type]


def test_a_run_without_a_folder_cannot_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save_on_signals=\('SIGTERM',\) needs a folder"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_signals=["SIGTERM"]))
