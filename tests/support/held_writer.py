"""Stopping a checkpoint's background thread before it writes anything, until a test lets it go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from accelerate.checkpoint import background

SECONDS = 60.0


class HeldWriter:
    """While it holds, no background thread begins its work.

    Args:
        patch: Puts things back after the test.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._may_write = threading.Event()
        self._patch = patch
        run = background.BackgroundSave._run

        def run_when_released(save: Any, work: Any) -> None:
            assert self._may_write.wait(SECONDS), "nobody has let the writer go on"
            run(save, work)

        patch.setattr(background.BackgroundSave, "_run", run_when_released)

    def release(self) -> None:
        """Let it write."""
        self._may_write.set()

    def release_when_awaited(self) -> None:
        """Let it write as soon as the run waits for it."""
        real = background.BackgroundSaves.has_failed

        def has_failed(saves: Any) -> bool:
            self.release()
            return real(saves)

        self._patch.setattr(background.BackgroundSaves, "has_failed", has_failed)
