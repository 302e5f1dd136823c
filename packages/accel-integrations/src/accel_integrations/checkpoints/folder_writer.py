"""Writing files of a training state into an existing folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_ops.durable import fsync_file, write_atomically
from accel_ops.files import serialize


class FolderWriter:
    """Writes files one by one into an existing folder, each with an atomic rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Write one file and fsync it."""
        with write_atomically(self.folder / name) as file:
            serialize(obj, file, safe_serialization)

    def save_sharded(self, name: str, state: dict[str, Any]) -> None:
        """Write this rank's shards of a state into a folder in it, and fsync them."""
        from accel_integrations.checkpoints.sharded_writing import write_sharded

        self.adopt(write_sharded(self.folder, name, state))

    def adopt(self, names: Iterable[str]) -> None:
        """Fsync files that an engine wrote into the folder."""
        for name in names:
            fsync_file(self.folder / name)
