"""Command lines of accelerate 1.15 are understood as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_cli.main import COMMANDS, full_parser, main

CASES = json.loads((Path(__file__).parent / "facts" / "parse_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["argv"])[:50])
def test_namespace(case: dict[str, Any]) -> None:
    found = vars(full_parser().parse_args(case["argv"]))
    for name, value in case["namespace"].items():
        have = list(found[name]) if isinstance(found[name], tuple) else found[name]
        if name == "nondefault":
            assert set(value) <= have
        elif not str(value).startswith("<"):  # a path of the machine on which the facts were collected
            assert have == value, name


def test_both_spellings_mean_the_same() -> None:
    parse = COMMANDS["launch"].make_parser().parse_args
    one = parse(["--mixed_precision", "bf16", "--num_processes=2", "x.py"])
    other = parse(["--mixed-precision", "bf16", "--num-processes=2", "x.py"])
    assert vars(one) == vars(other)


def test_what_follows_the_script_is_the_scripts() -> None:
    args = COMMANDS["launch"].make_parser().parse_args(["x.py", "--cpu", "--help"])
    assert args.training_script_args == ["--cpu", "--help"]
    assert args.cpu is False


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "launch" in capsys.readouterr().out


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"accelerate {command}" in capsys.readouterr().out
