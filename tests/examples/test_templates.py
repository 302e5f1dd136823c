"""Config files, SLURM scripts and the launcher over ssh: each is accepted, with what it needs played by small programs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.configfile.read import load_config_from_file
from accel_cli.examples.catalog import FILES
from accel_cli.main import main
from accel_state.settings.deepspeed import DeepSpeedPlugin

CONFIGS = sorted(FILES.rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_files_are_accepted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config_from_file(str(path))
    assert config.mixed_precision in ("no", "fp16", "bf16", "fp8")
    if path.stem == "sagemaker":  # launching needs an account
        assert config.ec2_instance_type == "ml.p4d.24xlarge"
        return
    assert (
        main(["launch", "--config_file", str(path), "--dry_run", str(FILES / "config_yaml_templates" / "run_me.py")])
        == 0
    )
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["mixed_precision", config.mixed_precision] in shown
    assert ["num_processes", str(config.num_processes)] in shown


@pytest.mark.parametrize("path", sorted(FILES.glob("deepspeed_config_templates/*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_are_accepted(path: Path) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=path)
    assert f"stage{plugin.zero_stage}" in path.stem
    offloaded = plugin.get_value("zero_optimization.offload_optimizer.device")
    assert (offloaded == "cpu") is ("offload" in path.stem)


def write_program(folder: Path, name: str, text: str) -> None:
    """A program for the shell."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("path", sorted(FILES.glob("slurm/*.sh")), ids=lambda path: path.stem)
def test_slurm_scripts_lead_to_a_valid_launch(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = tmp_path / "called"
    write_program(tmp_path / "bin", "accelerate", f"printf '%s\\n' \"$@\" > {called}")
    write_program(tmp_path / "bin", "srun", 'exec "$@"')
    write_program(tmp_path / "bin", "scontrol", "printf 'node7\\nnode8\\n'")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_NODEID": "1"}
    environment |= {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "node[7-8]"}
    script = tmp_path / "train.py"
    script.touch()
    subprocess.run(["bash", str(path), str(script), "--epochs", "3"], check=True, env=environment)
    words = called.read_text().splitlines()
    assert words[0] == "launch"
    assert words[-3:] == [str(script), "--epochs", "3"]
    assert main(["launch", "--dry_run", *words[1:]]) == 0
    shown = capsys.readouterr().out
    if "multinode" in path.stem:
        assert words[words.index("--machine_rank") + 1] == "1"
        assert words[words.index("--main_process_ip") + 1] == "node7"
        assert words[words.index("--num_processes") + 1] == "8"
    assert ("fsdp_version" in shown) is ("fsdp" in path.stem)


def test_the_remote_launcher_copies_and_launches(tmp_path: Path) -> None:
    write_program(tmp_path / "bin", "ssh", 'shift; exec bash -c "$*"')
    write_program(tmp_path / "bin", "scp", 'exec cp "$2" "${3#*:}"')
    script = tmp_path / "said.py"
    script.write_text("import sys; print(sys.argv[1:]); raise SystemExit(0)")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    program = [sys.executable, str(FILES / "multigpu_remote_launcher.py"), "--host", "user@machine"]
    options = ["--folder", str(tmp_path / "there"), "--python", sys.executable, "--launch", "--cpu --num_processes 1"]
    done = subprocess.run(
        [*program, *options, str(script), "--epochs", "two words"],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout.strip().strip("[]").replace(",", "")) == ["--epochs", "two words"]
