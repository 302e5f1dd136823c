"""The menu that programs import from accelerate's old paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.commands.menu import BulletMenu, input, keymap
from accelerate.commands.menu.input import KeyHandler, mark, register
from accelerate.commands.menu.keymap import ARROW_KEY_FLAG, KEYMAP
from tests.cli.terminal import CONTROL_C, DOWN, ENTER, UP, Terminal

PROGRAM = """
from accelerate.commands.menu import BulletMenu
print("chosen", BulletMenu("Which one?", ["this", "that", "other"]).run(default_choice=1))
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("pressed", "number"),
    [([ENTER], 1), ([UP, ENTER], 0), ([UP, UP, UP, ENTER], 0), ([DOWN, DOWN, DOWN, "x", "\t", ENTER], 2), (["0", ENTER], 0),
     (["9", "2", ENTER], 2)],
)  # fmt: skip
def test_choosing(tmp_path: Path, pressed: list[str], number: int) -> None:
    with Terminal(environ={}, program=PROGRAM) as terminal:
        terminal.answer("other", *pressed)
        assert terminal.finish() == 0, terminal.screen
    assert f"chosen {number}" in terminal.screen
    assert terminal.raw.count("\x1b[?25l") == terminal.raw.count("\x1b[?25h") == 1


@pytest.mark.launch
def test_interrupting() -> None:
    with Terminal(environ={}, program=PROGRAM) as terminal:
        terminal.answer("other", CONTROL_C)
        assert terminal.finish() != 0
    assert "KeyboardInterrupt" in terminal.screen
    assert "\x1b[?25h" in terminal.raw


@pytest.mark.parametrize(("line", "number"), [("2", 2), ("", 1), ("7", 1), ("x", 1)])
def test_without_a_terminal(line: str, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=f"{line}\n", capture_output=True, text=True, timeout=300, check=True
    )
    assert f"chosen {number}" in done.stdout


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("\x1b[A", KEYMAP["up"]), ("\x1b[D", KEYMAP["left"]), ("\x1b[Z", KEYMAP["undefined"]),
        ("\x1bx", KEYMAP["undefined"]), ("a", ord("a")), ("\r", KEYMAP["newline"]), ("\x03", KEYMAP["interrupt"]),
        ("\x01", KEYMAP["undefined"]),
    ],
)  # fmt: skip
def test_keys(monkeypatch: pytest.MonkeyPatch, sent: str, key: int) -> None:
    chars = iter(sent)
    monkeypatch.setattr(keymap, "get_raw_chars", lambda: next(chars))
    got = keymap.get_character()
    assert (ord(got) if isinstance(got, str) else got) == key
    assert list(chars) == []


def test_classes_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    @register
    class Door:
        @mark(KEYMAP["up"])
        @mark(KEYMAP["1"])
        def open(self) -> str:
            return "open"

    assert type(Door) is KeyHandler
    assert set(Door.key_handler) == {ord("A") + ARROW_KEY_FLAG, ord("1")}
    monkeypatch.setattr(input, "get_character", lambda: "1")
    assert Door().handle_input() == "open"
    monkeypatch.setattr(input, "get_character", lambda: "q")
    assert Door().handle_input() is None
    assert KEYMAP["up"] in BulletMenu.key_handler
