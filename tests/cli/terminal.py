"""A pseudo-terminal, with somebody who presses keys at it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.support.hidden_devices import NO_DEVICES

UP, DOWN, ENTER, BACKSPACE, CONTROL_C, CONTROL_D = "\x1b[A", "\x1b[B", "\r", "\x7f", "\x03", "\x04"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]")
PATIENCE_SECONDS = 120

PROGRAM = "import sys; from accel_cli.main import main; sys.exit(main())"


class Terminal:
    """Runs a program, `accelerate` if nothing else is asked for, on a terminal of its own.

    Args:
        *words: The words of the command line.
        environ: The environment variables.
        program: What Python runs.
    """

    def __init__(self, *words: str, environ: Mapping[str, str], program: str = PROGRAM) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words], stdin=theirs, stdout=theirs, stderr=theirs,
            env={"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **NO_DEVICES, **environ}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.raw = ""
        self.seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    @property
    def screen(self) -> str:
        """All that was shown, without colours and movements."""
        return ESCAPE.sub("", self.raw)

    def answer(self, question: str, *keys: str) -> None:
        """Wait for a question, then press keys."""
        self.wait_for(question)
        self.press(*keys)

    def press(self, *keys: str) -> None:
        """Press keys."""
        os.write(self.ours, "".join(keys).encode())

    def wait_for(self, text: str) -> None:
        """Read until a text is shown that was not shown before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.screen.find(text, self.seen)) < 0:
            assert self._read(deadline), f"{text!r} was never shown after:\n{self.screen[self.seen :]}"
        self.seen = found + len(text)

    def finish(self) -> int:
        """Read to the end and return the exit status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        assert time.monotonic() < deadline, f"it did not end after:\n{self.screen[self.seen :]}"
        return self.process.wait(PATIENCE_SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            text = os.read(self.ours, 65536)
        except OSError:  # how Linux reports that the other side is gone
            return False
        self.raw += text.decode(errors="replace")
        return bool(text)
