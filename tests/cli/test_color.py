"""Colour on terminals, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from accel_cli.color import BOLD, CYAN, RED, paint


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colorful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_headings_flags_and_errors_stand_out() -> None:
    text = paint("usage: accelerate\n\noptions:\n  -h, --help  show this: and exit\n", TerminalStream())
    assert text.startswith(f"{BOLD}usage:")
    assert f"{BOLD}options:" in text
    assert f"  {CYAN}-h, --help\x1b" in text
    assert f"{RED}error:" in paint("accelerate launch: error: no such file: error: x", TerminalStream())


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_asks_for_none_gets_none(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert paint("options:\n", TerminalStream()) == "options:\n"


def test_files_and_pipes_get_none() -> None:
    assert paint("options:\n", io.StringIO()) == "options:\n"


def test_the_program_colors_what_a_terminal_shows() -> None:
    terminal, end = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "accel_cli", "lunch"], stderr=end, stdout=subprocess.PIPE) as program:
        os.close(end)
        shown = os.read(terminal, 4096).decode()
        assert program.wait() == 2
    os.close(terminal)
    assert f"{RED}error:" in shown
    assert "launch" in shown
