"""Writing a sharded state in the format of torch.distributed.checkpoint, at once or in two steps.

In two steps the ranks first plan together what each of them writes, with collectives, and copy it. Then each writes its copies,
in any thread, and the main process adds the metadata when it has been told what the others wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

from accel_ops.files.durable import make_folder


def write_sharded(folder: Path, name: str, state: dict[str, Any]) -> list[str]:
    """Write this rank's shards of a state; all ranks call this.

    Args:
        folder: The folder of the checkpoint.
        name: The folder in it for this state.
        state: Nested, with DTensors.

    Returns:
        Names of the files that this rank wrote, relative to `folder`.
    """
    target = make_folder(folder / name)
    _save(state, dcp.FileSystemWriter(target, sync_files=False))
    return _own_files(target)


class ShardCopies(dcp.FileSystemWriter):
    """Copies of this rank's shards of a state, to be written later; all ranks make them.

    Args:
        folder: The folder of the checkpoint.
        name: The folder in it for this state.
        state: Nested, with DTensors.
        copy: Copies a tensor of any shape into CPU memory.
    """

    def __init__(
        self, folder: Path, name: str, state: dict[str, Any], copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._target = make_folder(folder / name)
        super().__init__(self._target, sync_files=False)
        self._copy = copy
        self._plan: Any = None
        self._metadata: Any = None
        self._items: dict[Any, Any] = {}
        self._results: list[Any] = []
        _save(state, self)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Called by torch to write: copies instead."""
        self._plan = plan
        for item in plan.items:
            data = planner.resolve_data(item)
            self._items[item.index] = self._copy(data) if isinstance(data, torch.Tensor) else data
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Called by torch on the main process to write the metadata: keeps them."""
        self._metadata = metadata

    def resolve_data(self, item: WriteItem) -> Any:
        """What is written for an item of the plan."""
        return self._items.pop(item.index)

    def write(self) -> list[Any]:
        """Write the copies and drop them.

        Returns:
            What the main process has to know about it.
        """
        written: list[Any] = super().write_data(self._plan, self).wait()  # type: ignore[arg-type]
        return written

    def complete(self, results: list[list[Any]]) -> list[str]:
        """Write the metadata, on the main process.

        Args:
            results: What `write` has returned on all ranks.

        Returns:
            Names of the files that this rank wrote, relative to the folder of the checkpoint.
        """
        if self._metadata is not None:
            super().finish(self._metadata, results)
        return _own_files(self._target)


def _save(state: dict[str, Any], writer: dcp.FileSystemWriter) -> None:
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def _own_files(target: Path) -> list[str]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = [
        name for name in os.listdir(target) if name.startswith(f"__{rank}_") or (name == ".metadata" and rank == 0)
    ]
    return [f"{target.name}/{name}" for name in sorted(names)]
