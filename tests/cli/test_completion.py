"""Completion, asked for by pressing the tabulator in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_cli.completion.command import PROGRAMS, SHELLS, completion_script
from accel_cli.completion.words import ANYTHING, FILE, FOLDER, Words, read_words
from accel_cli.main import COMMANDS, full_parser, main
from tests.cli.running import run
from tests.cli.terminal import Terminal

TAB, NEW_LINE = "\t", "\r"

CASES = [
    ("accelerate la", "launch"),
    ("accelerate config up", "update"),
    ("accelerate launch --mixed_pre", "--mixed_precision"),
    ("accelerate launch --mixed-pre", "--mixed-precision"),
    ("accelerate launch --mixed_precision fp1", "fp16"),
    ("accelerate launch --mixed-precision=b", "bf16"),
    ("accelerate launch --cpu --config_file setti", "settings.yaml"),
    ("accelerate launch tra", "train.py"),
    ("accelerate launch train.py --data se", "settings.yaml"),  # not a flag of ours
    ("accelerate launch -m mod ot", "other folder"),
    ("accelerate-launch --use_f", "--use_fsdp"),
    ("accelerate merge-weights ot", "other folder"),
    ("accelerate launch --use_fsdp --fsdp_auto_wrap_policy TR", "TRANSFORMER_BASED_WRAP"),
    ("accelerate to-fsdp2 --ov", "--overwrite"),
    ("accelerate examples co", "copy"),
    ("accelerate examples copy cv_", "cv_example"),
    ("accelerate launch --use_deepspeed --deepspeed_config_file se", "settings.yaml"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where something can be completed, with the scripts in `.shell`."""
    (tmp_path / ".shell").mkdir()
    for shell in SHELLS:
        (tmp_path / ".shell" / shell).write_text(completion_script(shell))
    say = [f"{program}() {{ printf '<%s>\\n' \"${{@: -1}}\"; }}\n" for program in PROGRAMS]  # instead of running
    (tmp_path / ".shell" / "say").write_text("".join(say))
    (tmp_path / "train.py").touch()
    (tmp_path / "settings.yaml").touch()
    (tmp_path / "other folder").mkdir()
    return tmp_path


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def ask_bash(folder: Path, line: str) -> str:
    return typed(["bash", "--norc", "--noprofile", "-i"], folder, line, ". .shell/bash; bind 'set bell-style none'")


def ask_zsh(folder: Path, line: str, load: str = ". .shell/zsh") -> str:
    setup = f"autoload -Uz compinit && compinit -u -D; unsetopt beep; {load}"
    return typed(["zsh", "-f", "-i"], folder, line, setup)


def typed(shell: list[str], folder: Path, line: str, setup: str) -> str:
    """What a shell makes of a line and a tabulator, typed on a terminal, as it would be run; it is printed instead."""
    start = f"import os; os.chdir({str(folder)!r}); os.execvp({shell[0]!r}, {shell!r})"
    with Terminal(environ=environment(folder), program=start) as terminal:
        terminal.press(f"PS1='rea''dy> '; {setup}; . .shell/say; echo beg''in", NEW_LINE)
        terminal.wait_for("begin")
        terminal.wait_for("ready> ")
        terminal.press(line, TAB, NEW_LINE)
        terminal.wait_for("<")
        terminal.wait_for(">")
        shown = terminal.screen[: terminal.seen]
    return shown[shown.rindex("<") + 1 : -1]


def ask_fish(folder: Path, line: str) -> str:
    """The only thing that fish offers for a line."""
    words = ["fish", "--no-config", "-c", f"source .shell/fish; complete -C {line!r}"]
    done = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    (offered,) = done.stdout.splitlines()
    return offered.partition("\t")[0]


ASK: dict[str, Callable[[Path, str], str]] = {"bash": ask_bash, "zsh": ask_zsh, "fish": ask_fish}


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=needs(shell)) for shell in SHELLS])
@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_the_tabulator_completes_what_is_typed(shell: str, line: str, wanted: str, folder: Path) -> None:
    found = ASK[shell](folder, line).rstrip("/ ")
    assert found.removeprefix("--mixed-precision=") == wanted


@needs("zsh")
def test_zsh_can_load_the_script_when_it_is_wanted(folder: Path) -> None:
    (folder / ".functions").mkdir()
    (folder / ".shell" / "zsh").rename(folder / ".functions" / "_accelerate")
    load = "fpath=($HOME/.functions $fpath); compinit -u -D"
    assert ask_zsh(folder, "accelerate launch --mixed_precision fp1", load) == "fp16"


@needs("bash")
def test_bash_offers_everything_that_fits(folder: Path) -> None:
    def offers(*words: str) -> list[str]:
        program = (
            '. .shell/bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _accelerate; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        return run("bash", "--norc", "-c", program, "bash", *words, folder=folder).stdout.split()

    assert offers("accelerate", "") == list(COMMANDS)
    assert offers("accelerate", "launch", "--mixed_precision", "") == ["no", "fp16", "bf16", "fp8"]
    assert offers("accelerate", "launch", "--mixed_precision", "=", "f") == ["fp16", "fp8"]
    assert offers("accelerate", "launch", "--mixed_precision", "=") == ["no", "fp16", "bf16", "fp8"]
    assert offers("accelerate", "launch", "--num_processes", "") == []
    assert offers("accelerate", "completion", "") == list(SHELLS)
    flags = offers("accelerate", "launch", "--")
    assert {"--cpu", "--num_processes", "--fsdp_version"} <= set(flags)
    assert not [flag for flag in flags if "-" in flag[2:]]  # one spelling is enough
    assert "--ipex" not in flags  # accepted, but nobody should type it


def test_every_command_has_its_words() -> None:
    found: dict[str, Words] = {words.path: words for words in read_words(full_parser())}
    assert {*COMMANDS, "config default", "config update", "examples list", "examples copy", ""} == set(found)
    launch = {flag.spelling: flag.values for flag in found["launch"].flags}
    assert launch["--cpu"] == ()
    assert launch["--num_processes"] == (ANYTHING,)
    assert launch["--config_file"] == (FILE,)
    assert launch["--log_dir"] == (FOLDER,)
    assert launch["--zero3_init_flag"] == ("true", "false")
    assert {"-q", "--quiet", "-t", "--tee"} <= set(launch)
    assert found["launch"].runs_another
    assert found["launch"].argument == (FILE,)
    assert not found["env"].runs_another


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef accelerate accelerate-config")
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "powershell"])
