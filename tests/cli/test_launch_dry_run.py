"""`accelerate launch --dry_run`: every setting, where it comes from, and a command that does the same."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from accel_cli.launch.files import write_private
from accel_cli.launch.plan import Plan
from accel_cli.launch.show import shell_command, show
from accel_cli.main import main
from tests.cli.pretended import settled
from tests.cli.running import PROGRAM, run
from tests.support.ports import free_ports

SEEN = """
import json, os, sys
names = ("ACCELERATE_", "FSDP_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "KMP_")
ties = ("ACCELERATE_SUPERVISION", "MASTER_ADDR", "MASTER_PORT")  # to this very launcher, or to torch's agent
seen = {name: text for name, text in os.environ.items() if name.startswith(names) and name not in ties}
with open("seen" + os.environ.get("RANK", "") + ".json", "w") as file:
    json.dump({"variables": seen, "argv": sys.argv[1:]}, file)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, in_a_folder_with_a_script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_cli.launch.machine.Machine.num_devices", lambda self: 0)
    (tmp_path / "train.py").write_text(SEEN)


def printed(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, list[str]], str]:
    """Run with --dry_run; returns the table as name -> [value, source], and the command."""
    assert main(["launch", "--dry_run", *words]) == 0
    table, _, command = capsys.readouterr().out.partition("The same by hand:")
    rows = [line.split(maxsplit=2) for line in table.splitlines()[2:] if line.strip()]
    return {row[0]: [word.strip() for word in row[1:]] for row in rows}, command.strip()


def test_every_value_says_where_it_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("a.json").write_text(
        json.dumps({"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True, "mixed_precision": "bf16"})
    )
    rows, command = printed("--config_file", "a.json", "--debug", "train.py", capsys=capsys)
    assert rows["debug"] == ["True", "flag"]
    assert rows["mixed_precision"] == ["bf16", "config file a.json"]
    assert rows["use_fsdp"] == ["True", "config file a.json"]
    assert rows["cpu"] == ["True", "config file a.json"]
    assert rows["fsdp_version"] == ["2", "environment variable FSDP_VERSION"]
    assert rows["num_cpu_threads_per_process"][1] == "guess"
    assert rows["fsdp_use_orig_params"] == ["true", "default"]
    assert "FSDP_VERSION=2" in command  # the command needs nothing of this shell
    assert not list(Path().glob("seen*"))


def test_defaults_are_shown_where_they_count() -> None:
    def shown(*words: str, **environ: str) -> str:
        return show(*settled(*words, "--num_processes", "1", "train.py", environ=environ))

    assert "fp8_margin" not in shown("--cpu")
    assert "rdzv_backend" not in shown("--cpu")
    lines = [line.split() for line in shown("--use_megatron_lm").splitlines()]
    assert ["megatron_lm_pp_degree", "1", "default"] in lines
    row = next(line for line in shown(ACCELERATE_USE_CPU="true").splitlines() if line.startswith("cpu"))
    assert row.split(maxsplit=2) == ["cpu", "True", "environment variable ACCELERATE_USE_CPU"]


def test_notes_go_elsewhere_than_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dry_run", "--cpu", "--ipex", "train.py"]) == 0
    said = capsys.readouterr()
    assert "--ipex has no effect any more" in said.err
    assert "no effect" not in said.out


@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize(
    "words",
    [
        ["--cpu", "--mixed_precision", "bf16", "train.py", "--name", "it's a $PATH", "*"],
        ["--cpu", "--num_processes", "2", "--use_fsdp", "--fsdp_version", "2", "train.py", "--x"],
    ],
)
def test_the_printed_command_does_the_same(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environ = dict(os.environ)

    def seen(*command: str) -> list[object]:
        subprocess.run(command, env=environ, check=True, timeout=300, capture_output=True)
        found = [json.loads(path.read_text()) for path in sorted(Path().glob("seen*"))]
        for path in Path().glob("seen*"):
            path.unlink()
        return found

    # The printed command cannot move to another port, and other tests launch beside this one.
    words = ["--main_process_port", str(free_ports(1)[0]), *words]
    _, command = printed(*words, capsys=capsys)
    by_program = seen(PROGRAM, "launch", *words)
    assert by_program
    assert seen("sh", "-c", command) == by_program


def test_secrets_stay_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.json").write_text(
        json.dumps({
            "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO", "ec2_instance_type": "ml.g5",
            "iam_role_name": "role", "mixed_precision": "no",
        })
    )  # fmt: skip
    words = ["--aws_access_key_id", "public", "--aws_secret_access_key", "secret"]
    rows, command = printed("--config_file", "a.json", *words, "train.py", capsys=capsys)
    assert rows["aws_secret_access_key"] == ["***", "flag"]
    assert 'AWS_SECRET_ACCESS_KEY="$AWS_SECRET_ACCESS_KEY"' in command
    assert "secret" not in command
    assert "public" not in command


def test_a_launch_without_variables_needs_no_env() -> None:
    assert shell_command(Plan("tpu_pod", ("a", "b c"), {})) == "a 'b c'"


def test_files_are_part_of_the_command(tmp_path: Path) -> None:
    text = "A=it's\nB=2\n"
    plan = Plan("deepspeed", ("cat", "variables"), {}, files=(("variables", text),))
    assert run("sh", "-c", shell_command(plan)).stdout == text
    assert stat.S_IMODE((tmp_path / "variables").stat().st_mode) == 0o600


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "mine").symlink_to("other")
    write_private("mine", "text")
    assert (tmp_path / "other").read_text() == "theirs"
    assert (tmp_path / "mine").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="'no/file' cannot be written: No such file"):
        write_private("no/file", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="'folder' cannot be written"):
        write_private("folder", "")
    assert {path.name for path in tmp_path.iterdir()} == {"other", "mine", "folder", "train.py"}
