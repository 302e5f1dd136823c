"""Flags of the launcher after the script: a note where the script cannot mean them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.launch.command import misplaced_flags
from accel_cli.main import main
from tests.cli.pretended import settings_of

pytestmark = pytest.mark.usefixtures("in_a_folder_with_a_script")
PLAIN = "from accelerate import Accelerator\nprint(Accelerator().num_processes)\n"
PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"


def note(script: str, *arguments: str) -> str:
    Path("train.py").write_text(script)
    return " ".join(misplaced_flags(settings_of("--cpu", "train.py", *arguments)))


@pytest.mark.parametrize("flag", ["--num_processes", "--num-processes", "--num_processes=2", "--fsdp_version"])
@pytest.mark.parametrize("script", [PLAIN, PARSER + "parser.add_argument('--lr')\n" + PLAIN])
def test_a_flag_that_the_script_does_not_name(script: str, flag: str) -> None:
    assert note(script, flag, "2").startswith(
        f"{flag.partition('=')[0]} came after train.py, which gets it but has no such option."
    )


@pytest.mark.parametrize(
    "script",
    [
        PARSER + "parser.add_argument('--num-processes', '--num_processes')\n" + PLAIN,
        "from transformers import HfArgumentParser\n" + PLAIN,
        "import sys\nwords = sys.argv[1:]\n" + PLAIN,
        "from options import parse_options\n" + PLAIN,
        "import click, torch\n" + PLAIN,
        "from package import main\nmain()\n",  # whatever it does elsewhere
    ],
    ids=["own option", "transformers", "argv", "another file", "click", "all elsewhere"],
)  # fmt: skip
def test_scripts_that_may_mean_it_get_no_note(script: str) -> None:
    assert note(script, "--num_processes", "2") == ""


def test_other_arguments_get_no_note() -> None:
    assert note(PLAIN, "--lr", "2", "num_processes", "-m", "--", "--seed") == ""
    assert misplaced_flags(settings_of("--cpu", "--num_processes", "1", "train.py")) == ()


def test_the_launcher_prints_it_once_and_quiet_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(PLAIN)
    for quiet, times in (([], 1), (["--quiet"], 0)):
        main(["launch", "--cpu", "--dry_run", *quiet, "train.py", "--num_processes", "2"])
        assert capsys.readouterr().err.count("accelerate launch: --num_processes came after train.py") == times
