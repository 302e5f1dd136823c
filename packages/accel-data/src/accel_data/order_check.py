"""Compares what ranks read before each takes its shard of it: where they disagree, samples are lost."""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import Subset

from accel_ops.collectives.store_gather import FirstNote
from accel_state.processes import PartialState
from accel_state.warning import program_frame, warn_user

NUM_SHOWN = 8
"""So many indices are in the message."""


class OrderCheck:
    """Compares the indices of the first global batch with those of the rank that has first left its own in the process group's store.

    Nobody waits for another rank. One that came first, and would not learn that a later one differs, looks again
    after 2, 4, 8, ... batches and when an epoch begins.

    Args:
        dataset: The dataset of the loader; what a `Subset` chooses of its own counts.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._note = FirstNote(f"order/{_program_lines()}")
        self._is_compared = False

    def recording(self, batches: Iterable[Any], size: int) -> Iterator[Any]:
        """The same batches; the first ones are compared before they are read.

        Args:
            batches: Lists of indices, before they are sharded.
            size: How many of them make a global batch.

        Raises:
            ValueError: Another rank iterates other indices.
        """
        if self._is_compared:
            self._look()
            yield from batches
            return
        first: list[Any] = []
        number = 0
        for number, batch in enumerate(batches, 1):
            if number <= size:
                first.append(batch)
            if number == size:
                self._compare(first)
            elif number & (number - 1) == 0:
                self._look()
            yield batch
        if number < size:
            self._compare(first)
        self._look()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a loader is not the one that other ranks have

    def _compare(self, batches: list[Any]) -> None:
        self._is_compared = True
        try:
            indices = [_original(self._dataset, index) for batch in batches for index in batch]
        except (TypeError, KeyError, IndexError):  # no integers, which ranks may draw for themselves in part
            return
        shown, length = indices[:NUM_SHOWN], len(self._dataset) if hasattr(self._dataset, "__len__") else -1
        mine = [
            PartialState().process_index,
            zlib.crc32(json.dumps([length, indices]).encode()),
            length,
            shown,
            _rows(self._dataset, batches),
        ]
        first = self._note.leave(json.dumps(mine))
        if first is None:
            return
        other = json.loads(first)
        (low, _, low_length, low_shown, low_rows), (high, _, high_length, high_shown, high_rows) = sorted(
            [mine, other]
        )
        if mine[1] != other[1]:
            message = (
                f"Ranks {low} and {high} iterate different samples with the same data loader: of {low_length} samples, rank {low} begins with "
                f"{low_shown}, and of {high_length}, rank {high} with {high_shown}. As each keeps only its shard of them, samples would "
                "be lost. Prepare the loader as for one process, with the same data and the same seed on every rank; or, if each rank has "
                "only its own samples, set DataLoaderConfiguration(already_sharded=True)."
            )
            self._note.object_to(message)
            raise ValueError(message)
        if low_rows != high_rows:
            warn_user(
                f"Ranks {low} and {high} prepare datasets with different rows, of which each reads only its shard, so that samples are "
                "lost if the dataset was split by rank (split_dataset_by_node). Prepare the whole dataset on every rank, or set "
                "DataLoaderConfiguration(already_sharded=True)."
            )

    def _look(self) -> None:
        reason = self._note.objection()
        if reason is not None:
            raise ValueError(reason)


def _original(dataset: Any, index: Any) -> int:
    """The index in the dataset of which subsets were taken."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return operator.index(index)


def _rows(dataset: Any, batches: list[Any]) -> int:
    """A checksum of the first rows of a table of `datasets`, as they are stored: nothing is decoded or drawn; 0 for other data."""
    if not any(
        kind.__name__ == "Dataset" and kind.__module__ == "datasets.arrow_dataset" for kind in type(dataset).__mro__
    ):
        return 0
    return zlib.crc32(repr(dataset.with_format("arrow")[list(batches[0])].to_pydict()).encode()) if batches else 0


def _program_lines() -> str:
    """Where in the program a loader is prepared: the same on all ranks that prepare it, and for no other one."""
    frame: FrameType | None = program_frame()
    lines = []
    while frame is not None:
        lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return format(zlib.crc32("/".join(lines).encode()), "08x")
