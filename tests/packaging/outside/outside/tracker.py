"""A tracker: prints what it is given."""

from __future__ import annotations

from typing import Any

from accel_tracking.tracker import GeneralTracker


class PrintingTracker(GeneralTracker):
    """Prints numbers."""

    name = "printing"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self) -> PrintingTracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        print("tracker config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        print("tracker", self.run_name, step, values)
