"""What cannot be done is said in one line that names the culprit; what is gone is said in one line, too."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_cli.launch.machine import holder_of
from accel_cli.launch.validate import check_script
from accel_cli.main import main
from tests.cli.pretended import plan_of, settings_of
from tests.cli.running import refusal

pytestmark = pytest.mark.usefixtures("in_a_folder_with_a_script")
TWO = ["--cpu", "--num_processes", "2"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_who_holds_a_port(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = holder_of(taken)
    assert said.startswith(f"process {os.getpid()} (")
    assert "python" in said
    with pytest.raises(ValueError, match=f"Port {taken} of this machine is taken by process {os.getpid()} "):
        plan_of(*TWO, "--main_process_port", str(taken), "train.py")
    monkeypatch.setattr("accel_cli.launch.machine._listening", lambda port: [])
    assert holder_of(taken) == "another program"


def test_a_notebook_is_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.ipynb").write_text('{"cells": [], "metadata": null}')
    said = refusal(capsys, "launch", "--cpu", "train.ipynb")
    assert "'train.ipynb' is a notebook, which Python cannot run. Convert it" in said


@pytest.mark.parametrize("words", [["--cpu"], TWO], ids=["one process", "two"])
def test_a_syntax_error_is_shown_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import os\nx = = 1\n")
    assert main(["launch", *words, "broken.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("accelerate launch: error: The script 'broken.py' has a syntax error:\n")
    assert 'File "broken.py", line 2' in error
    assert error.count("SyntaxError: invalid syntax") == 1


@pytest.mark.parametrize(
    "source", [b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", b"\xef\xbb\xbfx = 1\n", b"x = '\\d'\n", b"x = 1\r\n"]
)
def test_scripts_that_are_fine(source: bytes) -> None:
    Path("fine.py").write_bytes(source)
    check_script(settings_of("--cpu", "fine.py"))


def test_a_port_matters_only_where_somebody_listens(taken: int) -> None:
    port = ["--main_process_port", str(taken)]
    plan_of("--cpu", *port, "train.py")  # one process needs none
    several = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "10.0.0.1", *port]
    plan_of(*several, "--machine_rank", "1", "train.py")
    with pytest.raises(ValueError, match="is taken by"):
        plan_of(*several, "--machine_rank", "0", "train.py")


def test_words_of_variables_are_checked_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="variable FSDP_STATE_DICT_TYPE: 'FULL' is not one of"):
        plan_of("--use_fsdp", "--num_processes", "2", "train.py", environ={"FSDP_STATE_DICT_TYPE": "FULL"})
    plan_of("--use_fsdp", "--num_processes", "2", "--fsdp_sharding_strategy", "1", "train.py")  # as accelerate 1.15


def test_a_traceback_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" not in refusal(capsys, "launch", "--cpu", "tain.py")
    assert main(["launch", "--cpu", "--debug", "tain.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.splitlines()[-1].startswith("accelerate launch: error: The script 'tain.py' does not exist.")


@pytest.mark.parametrize(
    ("words", "environ", "note"),
    [
        (["--ipex"], {}, "--ipex has no effect any more"),
        (["--use-xpu"], {}, "--use_xpu has no effect any more"),
        ([], {"ACCELERATE_USE_IPEX": "true"}, "variable ACCELERATE_USE_IPEX has no effect any more"),
        ([], {"ACCELERATE_USE_XPU": "1"}, "variable ACCELERATE_USE_XPU has no effect any more"),
        (["--mixed_precision", "fp8", "--fp8_backend", "msamp"], {}, "MS-AMP is no longer maintained"),
        (["--fsdp_version", "2"], {}, "--fsdp_version: no effect without --use_fsdp"),
        (["--zero_stage", "2"], {}, "--zero_stage: no effect without --use_deepspeed"),
        (["--vm", "a", "--downcast_bf16"], {}, "--vm, --downcast_bf16: no effect without --tpu"),
        (["--fp8_format", "E4M3"], {}, "--fp8_format: no effect without --mixed_precision fp8"),
        (["--mpirun_hostfile", "h"], {}, "--mpirun_hostfile: no effect without --cpu"),
        (["--use_parallelism_config", "--parallelism_config_cp_comm_strategy", "alltoall"], {},
         "no effect without --use_parallelism_config and --parallelism_config_cp_size"),
        (["--cpu", "--gpu_ids", "1"], {}, "--gpu_ids has no effect with --cpu"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said_once(words: list[str], environ: dict[str, str], note: str) -> None:
    (said,) = settings_of(*words, "train.py", environ=environ).notes
    assert note in said


def test_ordinary_launches_say_nothing() -> None:
    assert settings_of(*TWO, "train.py").notes == ()
    assert settings_of("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "train.py").notes == ()
