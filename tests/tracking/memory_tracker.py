"""A tracker that remembers how it was called."""

from __future__ import annotations

from typing import Any

from accel_tracking.tracker import GeneralTracker


class MemoryTracker(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self, run: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("made", run, settings)] if run else []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")
