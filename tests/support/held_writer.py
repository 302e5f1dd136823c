"""Stopping a checkpoint's background thread before it writes anything, until a test lets it go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from accelerate.checkpoint import background, transaction

SECONDS = 60.0


class HeldWriter:
    """While it holds, no background thread writes a file.

    Args:
        patch: Puts things back after the test.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._may_write = threading.Event()
        self._patch = patch
        real_save = transaction.StagedWriter.save

        def save(writer: Any, *args: Any, **kwargs: Any) -> None:
            if threading.current_thread().name == "save_state":
                assert self._may_write.wait(SECONDS), "nobody has let the writer go on"
            real_save(writer, *args, **kwargs)

        patch.setattr(transaction.StagedWriter, "save", save)

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
