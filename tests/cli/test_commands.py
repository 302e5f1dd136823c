"""The program from inside: exit statuses and what is printed."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml

import accel_cli.env
import accel_state.devices
from accel_cli import main as program
from accel_cli.launch import command
from accel_cli.launch.flags.table import SHOWN_WITH, known_options
from accel_cli.launch.machine import Machine, free_port, is_free, network_variables
from accel_cli.launch.plan import Plan
from accel_cli.main import COMMANDS, full_parser, launch_main, main
from accelerate.commands import env as old_env
from tests.cli.running import PROGRAM, python, refusal, run


@pytest.fixture(autouse=True)
def script(tmp_path: Path, in_a_folder_with_a_script: None) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of the launches of a test, which start nothing."""
    seen: list[Plan] = []
    monkeypatch.setattr(command, "run_plan", lambda plan: seen.append(plan) or 7)
    monkeypatch.setattr("accel_cli.launch.runners.simple.become", seen.append)
    return seen


def test_the_help_of_the_program_and_of_the_commands_agree() -> None:
    parser = full_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    said = {choice.dest: choice.help for choice in commands._choices_actions}
    assert said == {name: row.help for name, row in COMMANDS.items()}


def test_the_help_of_the_program_lists_the_commands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out.partition("commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed if line.split()[0] in (*COMMANDS, "command")] == list(COMMANDS)


WITHOUT = """
import importlib.abc, sys
hidden = sys.argv.pop(1).split(",")
for finder in list(sys.meta_path):
    real = finder.find_spec
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None, real=real):
            return None if name.partition(".")[0] in hidden else real(name, path, target)
    sys.meta_path[sys.meta_path.index(finder)] = Finder()
from accel_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["estimate-memory", "gpt2"], "needs huggingface-hub, which is not installed. Run: pip install 'accel-cli[estimate]'"),
        (["estimate-memory", "."], "needs accel-ops, which is not installed. Run: pip install 'accel-cli[estimate]'"),
        (["rehearse", "train.py"], "need the package accelerate, which is not installed. Run: pip install accelerate"),
        (["merge-weights", "a", "b"], "needs accel-integrations, which is not installed. Run: pip install 'accel-cli[merge]'"),
        (["runs"], "needs accel-tracking, which is not installed. Run: pip install accel-tracking"),
    ],
)  # fmt: skip
def test_a_command_without_its_libraries_says_what_to_install(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    hidden = "accelerate,accel_ops,accel_bigmodel,accel_integrations,accel_tracking,huggingface_hub,timm,transformers"
    done = python("-c", WITHOUT, hidden, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr


@pytest.mark.launch
def test_an_interrupt_while_torch_is_imported_prints_no_stack(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    words = ["launch", "--cpu", "--num_processes", "2", "--max_restarts", "1", "train.py"]
    done = run(PROGRAM, *words, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(("words", "title"), [([], ""), (["--use-fsdp"], "FSDP"), (["--tpu"], "TPU")])
def test_launch_help_shows_what_fits(words: list[str], title: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["launch", *words, "--help"])
    options, _, more = capsys.readouterr().out.partition("more options:")
    options, _, hint = options.rpartition("\n\n--num-processes is read as --num_processes")
    assert "hyphens" in hint
    assert ("--fsdp_version" in options) == (title == "FSDP")
    assert ("--vm" in options) == (title == "TPU")
    assert "--num-processes" not in options  # one spelling is enough
    assert "--help --use_megatron_lm" in more
    assert "ipex" not in options + more, "which has no effect any more"
    assert "--deepspeed_config_file" not in options
    shown = [row for row in known_options().values() if row.flags.startswith("-") and row.help != argparse.SUPPRESS]
    named = set(re.findall(r"--\w+", options + more))
    assert [row.flags for row in shown if row.flags.split()[-1] not in named] == [], "every flag is named"
    for line in re.findall(r"^  --help .*", more, re.MULTILINE) if not words else ():
        *given, heading = re.split(r" +", line.strip(), maxsplit=2)
        with pytest.raises(SystemExit, match="0"):
            main(["launch", *given])
        assert f"{heading}:" in capsys.readouterr().out, "what the last lines of the help tell to type is possible"


@pytest.mark.parametrize("flag", ["--help_all", "--help-all"])
def test_one_flag_shows_every_option_of_launch_by_group(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["launch", "--help"])
    assert "--help_all" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(SystemExit, match="0"):
        main(["launch", flag])
    text = capsys.readouterr().out
    rows = [row for row in known_options().values() if row.flags.startswith("-") and row.help != argparse.SUPPRESS]
    assert [row.name for row in rows if row.flags.split()[-1] not in text] == []
    assert [title for title in SHOWN_WITH if f"{title}:" not in text] == []
    assert "more options:" not in text


@pytest.mark.parametrize("width", ["50", "200", "no number"])
def test_help_fits_the_terminal(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert "--mixed_precision" in COMMANDS["launch"].make_parser().format_help()


def test_one_process_takes_the_place_of_the_program(plans: list[Plan]) -> None:
    main(["launch", "--cpu", "train.py"])
    assert plans[0].runner == "simple"


def test_the_status_of_several_is_passed_on(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "num_devices", lambda self: 2)
    assert main(["launch", "train.py"]) == 7
    assert "2 processes" in capsys.readouterr().err
    assert main(["launch", "-q", "train.py"]) == 7
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "argv", ["accelerate-launch", "--cpu", "--num_processes", "2", "train.py"])
    assert launch_main() == 7
    assert [plan.runner for plan in plans] == ["torchrun", "torchrun", "local"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--cpu", "--tpu", "train.py"], "accelerate launch: error: --cpu and --tpu exclude one another"),
        (["launch", "--config_file", "no.yaml", "train.py"], "'no.yaml' does not exist"),
        (["launch", "--cpu", "tain.py"], "Did you mean 'train.py'?"),
        (["env", "--config_file", "no.yaml"], "accelerate env: error: Config file 'no.yaml' does not exist"),
        (["config", "default", "--config_file", "train.py/a.yaml"], "accelerate config: error:"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *words)


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> NoReturn:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(accel_cli.env, "env_command", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        main(["env"])


def test_programs_may_launch_too() -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    parse = launch_command_parser().parse_args
    launch_command(parse(["--cpu", "train.py"]))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launch_command(parse(["--cpu", "train.py", "3"]))
    assert caught.value.returncode == 3
    with pytest.raises(SystemExit, match="3"):
        launch_command(parse(["--cpu", "--quiet", "train.py", "3"]))


def test_default_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--mixed-precision", "bf16"]) == 0
    assert "written" in capsys.readouterr().out
    (file,) = (tmp_path / "home" / "accelerate").iterdir()
    assert yaml.safe_load(file.read_text())["mixed_precision"] == "bf16"
    before = file.read_text()
    assert main(["config", "default"]) == 0
    assert "already exists" in capsys.readouterr().out
    assert file.read_text() == before


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert "- PyTorch version: 2." in said
    assert "Not found" in said
    for label in ("Platform", "Python version", "Numpy version", "PyTorch accelerator"):  # which templates look for
        assert f"- {label}: " in said
    Path("a.yaml").write_text("{distributed_type: FSDP, num_processes: 2}")
    assert main(["env", "--config_file", "a.yaml"]) == 0
    assert "\t- distributed_type: FSDP" in capsys.readouterr().out


def test_a_report_of_a_program_that_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("accelerate.commands.env.which", asked.append)  # which gives None
    facts = old_env.env_command(old_env.env_command_parser().parse_args([]))
    assert asked == ["accelerate"]
    assert facts["`accelerate` bash location"] == "Not found"


def test_a_report_on_what_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("home/accelerate").mkdir(parents=True)
    Path("home/accelerate/default_config.yaml").write_text("a: [")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", None)
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert "PyTorch version: unknown (ModuleNotFoundError" in said
    assert "not valid YAML" in said
    assert "Python version: 3." in said


@pytest.mark.parametrize("command", ["examples", "env", "completion bash"])
def test_a_reader_that_ends_early_is_no_error(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([PROGRAM, *command.split()], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")  # as of a program that SIGPIPE ends


def test_a_report_with_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_name=lambda: "Big One")
    kind = SimpleNamespace(name="cuda", module=lambda: module, device_count=lambda: 2)
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: kind)
    assert accel_cli.env.describe()["PyTorch accelerator"] == "2 x cuda Big One"
    assert accel_cli.env.describe()["GPU type"] == "Big One"
    kind.module = lambda: None
    assert accel_cli.env.describe()["PyTorch accelerator"] == "2 x cuda"


@pytest.mark.parametrize(
    "command",
    [name for name in COMMANDS if name not in ("completion", "examples", "kubernetes", "rehearse", "runs", "slurm")],
)  # new ones
def test_commands_are_programs_of_their_own(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"estimate-memory": "estimate", "merge-weights": "merge", "tpu-config": "tpu", "to-fsdp2": "to_fsdp2"}
    name = entries.get(command, command)
    entry = import_module(f"accelerate.commands.{name}").main
    assert entry is getattr(program, f"{name}_main")
    monkeypatch.setattr(sys, "argv", ["accelerate", "--help"])
    with pytest.raises(SystemExit, match="0"):
        entry()


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    port = free_port()
    assert is_free(port)
    assert Machine().port(None, default=port) == port
    assert Machine().port(1234) == 1234
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free(port)
        assert Machine().port(None, default=port) != port
    assert Machine().num_cores() >= 1
    kind = SimpleNamespace(name="npu", device_count=lambda: 3, visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES")
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: kind)
    assert Machine().num_devices() == 3
    assert Machine().visible_devices_variable() == "ASCEND_RT_VISIBLE_DEVICES"
    kind.name = "cpu"
    assert Machine().num_devices() == 0


def test_cards_that_cannot_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setattr("accel_state.environment.check_cuda_p2p_ib_support", lambda: False)
    assert network_variables() == {"NCCL_P2P_DISABLE": "1"}
    monkeypatch.setattr("accel_state.environment.check_cuda_p2p_ib_support", lambda: True)
    assert network_variables() == {}


# ---- the program itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lauch", "train.py"], "'lauch' is not a command. Did you mean 'launch'?"),
        (["train.py"], "'train.py' is not a command. To run a script, write: accelerate launch train.py"),
        (["xyz"], "'xyz' is not a command. The commands are completion, config,"),
        (["launch"], "the following arguments are required: training_script\n"),
        (["launch", "--mixed_precision", "bfloat16", "train.py"], "Did you mean 'bf16'?"),
    ],
)
def test_mistyped_words_are_answered_with_a_guess(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "how", [["-m", "accel_cli"], ["-m", "accel_cli.main"], ["-m", "accelerate.commands.accelerate_cli"]]
)
def test_the_program_runs_as_a_module(how: list[str]) -> None:
    done = python(*how, "--version")
    assert done.stdout == f"accelerate {version('accelerate')} (accel-cli {version('accel-cli')})\n"
    done = python(*how, "lauch")
    assert (done.returncode, done.stdout) == (2, ""), "the exit status is the program's"


def test_the_version_without_the_umbrella(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if name == "accelerate":
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr("importlib.metadata.version", installed)
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == "accel-cli 1.2\n"
