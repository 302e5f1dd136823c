"""`ACCELERATE_CHECK_GRADIENTS=1 accelerate launch`: launches that agree with one process, wrong ones, and those that cannot be checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.grid.launch_check import check_launch
from accel_cli.launch import command
from accel_cli.launch.plan import Plan
from accel_cli.launch.resolve import from_namespace
from accel_cli.launch.settings import CHECK_GRADIENTS, LaunchSettings
from accel_cli.main import main
from accel_cli.selftest import script_path

SCRIPT = """
import os, sys
import torch
from accelerate import Accelerator

how = sys.argv[1]
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = [(torch.randint(16, (3,)), torch.randn(3, 4)) for _ in range(16)]
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for index, (tokens, targets) in enumerate(loader):
    if index == 0:
        with open("log.txt", "a") as log:
            log.write(f"{accelerator.num_processes} {len(tokens)} {os.environ.get('ACCELERATE_CHECK_GRADIENTS')}\\n")
    loss = (model(tokens).float() - targets).square().mean()
    if how == "multiplied":
        loss = loss * accelerator.num_processes
    if how == "broken" and accelerator.num_processes == 2:
        raise RuntimeError("broken on two ranks")
    if how == "idle":
        continue
    with accelerator.accumulate(model):
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print("trained to the end")
accelerator.end_training()
"""
TWO_RANKS = ("--cpu", "--num_processes", "2", "--main_process_port", "0")
FSDP = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP")
ZERO = ("--use_deepspeed", "--zero_stage", "2", "--zero3_init_flag", "false")
SEQUENCE = "--use_parallelism_config --parallelism_config_sp_size 2 --parallelism_config_sp_backend torch"


def launch(folder: Path, *words: str) -> tuple[int, str, str]:
    """The exit status of a checked launch, what it printed, and the lines that the script itself wrote."""
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.main", "launch", *words], cwd=folder, env={**os.environ, CHECK_GRADIENTS: "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    log = folder / "log.txt"
    return done.returncode, done.stdout, log.read_text() if log.exists() else ""


@pytest.mark.launch
@pytest.mark.thorough
def test_a_right_launch_is_checked_on_one_sample_for_each_rank_and_then_runs(tmp_path: Path) -> None:
    status, printed, log = launch(tmp_path, *TWO_RANKS, *FSDP, "--mixed_precision", "bf16", "-m", "train", "right")
    assert status == 0, printed
    assert printed.count("Gradients checked: relative differences of the first step from one process (loss ") == 1, (
        printed
    )
    assert printed.index("Gradients checked") < printed.index("trained to the end")
    assert log.splitlines() == ["1 2 None", "2 1 None", "2 1 None", "2 4 1", "2 4 1"]


@pytest.mark.launch
@pytest.mark.takes_turns
def test_a_launch_whose_loss_is_multiplied_by_the_ranks_does_not_start(tmp_path: Path) -> None:
    status, printed, log = launch(tmp_path, *TWO_RANKS, "train.py", "multiplied")
    assert status == 1, printed
    assert "Gradients differ from one process: the loss of step 1 is " in printed
    assert "a relative difference of 1.0e+00" in printed
    assert "trained to the end" not in printed
    assert len(log.splitlines()) == 3


@pytest.mark.launch
@pytest.mark.takes_turns
def test_a_script_without_a_step_runs_unchecked(tmp_path: Path) -> None:
    status, printed, log = launch(tmp_path, "--cpu", "--num_processes", "1", "train.py", "idle")
    assert status == 0, printed
    assert "Gradients not checked: the script took no optimizer step in one process.\n" in printed
    assert printed.endswith("trained to the end\n")
    assert log.splitlines() == ["1 1 None", "1 4 1"]


@pytest.mark.launch
@pytest.mark.thorough
def test_an_error_of_the_first_step_is_shown_and_one_before_it_is_not_the_checks_business(tmp_path: Path) -> None:
    status, printed, log = launch(tmp_path, *TWO_RANKS, "train.py", "broken")
    assert status == 1, printed
    assert "Traceback" in printed
    assert "Gradients not checked: the first step ends with RuntimeError: broken on two ranks." in printed
    assert len(log.splitlines()) == 3
    tensor_parallel = ("--use_parallelism_config", "--parallelism_config_tp_size", "2")
    status, printed, _ = launch(tmp_path, *TWO_RANKS, *tensor_parallel, "train.py", "right")
    assert "Gradients not checked: before its first forward pass, the script ends with ValueError: " in printed
    assert printed.index("Gradients not checked") < printed.index("Traceback")  # of the run itself


@pytest.mark.launch
@pytest.mark.thorough
def test_zero_2_with_accumulation_clips_as_the_script_if_the_launch_says_so(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    status, printed, _ = launch(tmp_path, *TWO_RANKS, *ZERO, "--gradient_clipping", "0.1", "train.py", "right")
    assert status == 0, printed
    assert "Gradients checked: " in printed
    status, printed, _ = launch(tmp_path, *TWO_RANKS, *ZERO, "train.py", "right")  # which clips to a norm of 1
    assert status == 1, printed
    assert "Gradients differ from one process: the update of step 1 differs in " in printed


@pytest.mark.launch
@pytest.mark.thorough
def test_sequence_parallelism_without_token_weights_differs(tmp_path: Path) -> None:
    text = Path(script_path("gradient_grid.py")).read_text()
    for weighed, forgotten in {", weight=weight)": ")", '"weights")': '"steps")'}.items():
        assert weighed in text
        text = text.replace(weighed, forgotten)
    (tmp_path / "forgetful.py").write_text(text)
    status, printed, _ = launch(tmp_path, *TWO_RANKS, *SEQUENCE.split(), "forgetful.py")
    assert status == 1, printed
    assert "Gradients differ from one process: the loss of step 1 is " in printed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runner": "torchrun", "num_machines": 2}, "2 machines take part"),
        ({"runner": "simple", "started_by": "SLURM"}, "SLURM has started this command on each process"),
        ({"runner": "torchrun", "use_megatron_lm": True}, "Megatron-LM trains a model of its own"),
        ({"runner": "tpu"}, "the processes are started by tpu"),
        ({"runner": "sagemaker", "num_machines": None}, "the processes are started by sagemaker"),
        ({"runner": "local", "no_python": True}, "train.py is no Python program"),
        ({"runner": "local", "training_script": "-"}, "the script is read from standard input"),
    ],
)
def test_what_cannot_be_checked_is_said(
    settings: LaunchSettings, changes: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_launch(settings.with_changes(**changes)) == 0
    assert capsys.readouterr().err == f"Gradients not checked: {reason}.\n"


@pytest.fixture
def settings() -> LaunchSettings:
    args = command.launch_command_parser().parse_args([*TWO_RANKS, "train.py"])
    return from_namespace(args).with_changes(num_machines=1)


@pytest.mark.usefixtures("in_a_folder_with_a_script")
@pytest.mark.parametrize(("text", "status"), [("", 0), ("0", 0), ("false", 0), ("1", 1), ("true", 1), ("maybe", 2)])
def test_the_variable_is_a_bool(
    text: str, status: int, plans: list[Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CHECK_GRADIENTS, text)
    monkeypatch.setattr("accel_cli.grid.launch_check.check_launch", lambda settings: 1)
    assert main(["launch", *TWO_RANKS, "train.py"]) == status
    assert bool(plans) == (status == 0)
    assert ("environment variable ACCELERATE_CHECK_GRADIENTS: 'maybe' is not" in capsys.readouterr().err) == (
        status == 2
    )
