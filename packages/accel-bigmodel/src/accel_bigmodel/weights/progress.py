"""A progress bar in bytes for loading or writing that takes longer than a few seconds."""

from __future__ import annotations

import time
from typing import Any

from accel_state.libraries import is_tqdm_available

PATIENCE_SECONDS = 2.0


class ByteProgress:
    """Counts bytes, and shows a bar after `PATIENCE_SECONDS`, if tqdm is installed.

    Args:
        total: The total number of bytes.
        what: The description shown beside the bar.
        shown (`bool`): Whether this process shows a bar at all.
    """

    def __init__(self, total: int, what: str, shown: bool = True) -> None:
        self._total = total
        self._what = what
        self._done = 0
        self._show_at = time.monotonic() + PATIENCE_SECONDS if shown else float("inf")
        self._bar: Any = None

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() >= self._show_at:
            self._show()

    def _show(self) -> None:
        self._show_at = float("inf")
        if not is_tqdm_available():
            return
        from tqdm.auto import tqdm

        bar: Any = tqdm
        self._bar = bar(total=self._total, initial=self._done, desc=self._what, unit="B", unit_scale=True, leave=False)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
