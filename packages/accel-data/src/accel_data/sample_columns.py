"""Batches that a loader dispatches, as columns of samples: what has one entry for each sample is split, the rest is replicated.

A batch mostly is a structure of tensors of shape (samples, ...), which are sliced and concatenated as they are. Of any other, the
samples are numbered: lists with one entry for each sample (strings, numbers, images of different sizes) and leaves of the batch as a
whole (a name, a 0-dim tensor) stay on the main process, and are put back by the numbers that each rank gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_ops.nested import honor_mapping, honor_type, recursively_apply

COLUMN, ENTRIES, OF_BATCH = "column", "entries", "of the batch"
"""Kinds of leaves: a tensor of shape (samples, ...), a list with an entry for each sample, and one of the batch as a whole."""
CONTAINERS = (list, tuple, Mapping)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands in a skeleton for a column, or for a list of entries."""

    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class _Table:
    """What stays of a batch: the number of its first sample, its structure, and the lists in it."""

    first: int
    skeleton: Any
    entries: list[Sequence[Any]]


class SampleColumns:
    """Takes batches apart into tensors of shape (samples, ...), and puts local batches together from slices of these.

    Which leaves have samples is learned from the first batch, so that a short one is not mistaken.

    Args:
        batch_size: Samples of a full batch; None where only the batches say it.
        num_batches: How many batches make a global batch. What is not in columns is kept of the first ones, whose samples may be
            padding, and of the latest ones.
    """

    def __init__(self, batch_size: int | None, num_batches: int) -> None:
        self._batch_size = batch_size
        self._num_batches = num_batches
        self._kinds: Any = None
        self.num_structures = 0
        """How often another structure was learned, whose columns do not fit those before."""
        self._tables: list[_Table] = []
        self._count = 0

    def sizes(self, batches: Sequence[Any]) -> list[int]:
        """The samples of each batch.

        Raises:
            ValueError: It is not certain which leaves of a batch have one entry for each sample.
        """
        for batch in batches:
            if self._kinds is None or not _fits(batch, self._kinds):
                self._learn(batch)
        return [next(_lengths(batch, self._kinds)) for batch in batches]

    def take_apart(self, batches: list[Any]) -> list[Any]:
        """The columns of batches; batches of nothing but tensors of shape (samples, ...) come back as they are.

        Raises:
            ValueError: It is not certain which leaves of a batch have one entry for each sample.
        """
        sizes = self.sizes(batches)
        if set(_leaves(self._kinds)) == {COLUMN}:
            return batches
        return [self._columns(batch, size) for batch, size in zip(batches, sizes, strict=True)]

    def put_together(self, columns: Sequence[torch.Tensor]) -> Any:
        """The batch of slices of columns; the leaves of a batch as a whole are those of the first sample's batch."""
        places = [(self._table_of(number), number) for number in columns[-1].tolist()]
        skeleton = places[0][0].skeleton

        def leaf(stand_in: _Leaf) -> Any:
            if stand_in.kind == COLUMN:
                return columns[stand_in.index]
            entries = [table.entries[stand_in.index][number - table.first] for table, number in places]
            return honor_type(places[0][0].entries[stand_in.index], entries)

        return recursively_apply(leaf, skeleton, test_type=lambda item: isinstance(item, _Leaf))

    def _learn(self, batch: Any) -> None:
        """Learn from the first batch, or from one that shows that a list has samples, because it is shorter than the one before."""
        self.num_structures += 1
        self._kinds = _corrected(batch, self._kinds) if self._kinds is not None else None
        if self._kinds is None or not _fits(batch, self._kinds):
            self._kinds = _kinds_in(batch, self._likely_size(batch))

    def _likely_size(self, batch: Any) -> int:
        """The samples of the first batch, or of one with another structure than those before."""
        lengths = set(_possible_lengths(batch))
        tensors = _outer_lengths([batch])
        likely = {self._batch_size} & lengths or (tensors if len(tensors) == 1 else lengths)
        if len(likely) != 1:
            raise _uncertain(batch, f"leaves of lengths {sorted(lengths)}" if lengths else "no leaf that has samples")
        size = likely.pop()
        assert size is not None
        return size

    def _columns(self, batch: Any, size: int) -> list[torch.Tensor]:
        columns: list[torch.Tensor] = []
        entries: list[Sequence[Any]] = []
        skeleton = _skeleton(batch, self._kinds, columns, entries)
        self._tables.append(_Table(self._count, skeleton, entries))
        if len(self._tables) > 3 * self._num_batches:
            del self._tables[self._num_batches]
        numbers = torch.arange(self._count, self._count + size)
        self._count += size
        return [*columns, numbers]

    def _table_of(self, number: int) -> _Table:
        return next(table for table in reversed(self._tables) if table.first <= number)


# ---- learning from a batch ------------------------------------------------------------------------------------------


def _kinds_in(data: Any, size: int) -> Any:
    """The kind of each leaf of a batch of that many samples, in its structure.

    Raises:
        ValueError: A list could be one of samples as well as one of lists of samples.
    """
    if isinstance(data, torch.Tensor):
        return COLUMN if data.ndim and data.shape[0] == size else OF_BATCH
    if isinstance(data, Mapping):
        return {key: _kinds_in(value, size) for key, value in data.items()}
    if not isinstance(data, (list, tuple)):
        return OF_BATCH
    if len(data) == size and not hasattr(data, "_fields") and _is_list_of_samples(data, size):
        return ENTRIES
    if not any(isinstance(item, (torch.Tensor, *CONTAINERS)) for item in data):
        return OF_BATCH
    return [_kinds_in(item, size) for item in data]


def _is_list_of_samples(data: Sequence[Any], size: int) -> bool:
    """Whether a list as long as the batch has an entry for each sample, and is no structure of as many leaves.

    Samples are of one kind, but for those that are None: numbers and strings, tensors of one dtype and number of dimensions, mappings of the
    same keys. Of leaves that all have the batch's samples, there is a structure.
    """
    with_samples = [_has_samples(item, size) for item in data]
    if all(with_samples):
        if all(isinstance(item, (list, tuple)) for item in data):
            raise _uncertain(data, f"{size} lists of {size} entries, for {size} samples")
        return isinstance(data, list) and _are_images(data)
    likenesses = {_likeness(item) for item in data if item is not None}
    if len(likenesses) > 1:
        return False
    if isinstance(data, tuple) and any(with_samples):
        raise _uncertain(data, f"{size} tensors of which some have {size} rows, for {size} samples")
    return True


def _are_images(data: list[Any]) -> bool:
    """Whether these are images of different sizes, which could not be stacked; as many as they have channels."""
    if not all(isinstance(item, torch.Tensor) and item.ndim >= 3 for item in data) or len(data) < 3:
        return False
    return len({_likeness(item) for item in data}) == 1 and len({item.shape for item in data}) > 1


def _likeness(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.dtype, item.ndim
    if isinstance(item, Mapping):
        return tuple(item)
    return list if isinstance(item, (list, tuple)) else "plain"


def _has_samples(data: Any, size: int) -> bool:
    """Whether every leaf has an entry for each sample."""
    if isinstance(data, Mapping):
        return all(_has_samples(value, size) for value in data.values())
    if isinstance(data, torch.Tensor):
        return data.ndim > 0 and data.shape[0] == size
    return isinstance(data, (list, tuple)) and len(data) == size


def _corrected(data: Any, kinds: Any) -> Any:
    """The kinds, with lists of samples where one has another length now: structures have the same in every batch."""
    if isinstance(kinds, dict) and isinstance(data, Mapping) and kinds.keys() == data.keys():
        return {key: _corrected(data[key], kinds[key]) for key in kinds}
    if isinstance(kinds, list) and isinstance(data, (list, tuple)):
        if len(data) != len(kinds):
            return ENTRIES
        return list(map(_corrected, data, kinds))
    return kinds


def _possible_lengths(data: Any) -> Iterator[int]:
    """The lengths of all that could have an entry for each sample."""
    if isinstance(data, torch.Tensor) and data.ndim:
        yield data.shape[0]
    if isinstance(data, (list, tuple)):
        yield len(data)
    if isinstance(data, CONTAINERS):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _possible_lengths(item) if isinstance(item, (torch.Tensor, *CONTAINERS)) else ()


def _outer_lengths(level: list[Any]) -> set[int]:
    """The first dimensions of the outermost tensors that have one."""
    lengths = {item.shape[0] for item in level if isinstance(item, torch.Tensor) and item.ndim}
    if lengths:
        return lengths
    below = [item.values() if isinstance(item, Mapping) else item for item in level if isinstance(item, CONTAINERS)]
    return _outer_lengths([item for items in below for item in items]) if below else set()


def _uncertain(batch: Any, what: str) -> ValueError:
    return ValueError(
        f"dispatch_batches=True splits batches by samples, and it is not certain how to split one with {what}: {_sketch(batch)}. "
        "Give every leaf an entry for each sample, or set dispatch_batches=False, with which each process reads by itself."
    )


def _sketch(data: Any) -> str:
    """The structure of a batch in a line."""
    if isinstance(data, torch.Tensor):
        return f"tensor{list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key!r}: {_sketch(value)}" for key, value in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        shown = ", ".join(map(_sketch, data[:3]))
        return f"{type(data).__name__} of {len(data)} ({shown}{', ...' if len(data) > 3 else ''})"
    return type(data).__name__


# ---- walking through a batch beside its kinds -----------------------------------------------------------------------


def _fits(data: Any, kinds: Any) -> bool:
    """Whether a batch has the structure of the kinds that were learned."""
    if isinstance(kinds, dict):
        return (
            isinstance(data, Mapping)
            and kinds.keys() == data.keys()
            and all(_fits(data[key], kinds[key]) for key in kinds)
        )
    if isinstance(kinds, list):
        is_alike = isinstance(data, (list, tuple)) and len(data) == len(kinds)
        return is_alike and all(map(_fits, data, kinds))
    if kinds == COLUMN:
        return isinstance(data, torch.Tensor) and data.ndim > 0
    return kinds == OF_BATCH or isinstance(data, (list, tuple))


def _lengths(data: Any, kinds: Any) -> Iterator[int]:
    """The lengths of the leaves that have samples, those of tensors first."""
    pairs = list(_pairs(data, kinds))
    for with_samples in (COLUMN, ENTRIES):
        yield from (len(leaf) for leaf, kind in pairs if kind == with_samples)


def _pairs(data: Any, kinds: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(kinds, str):
        yield data, kinds
        return
    for key in kinds if isinstance(kinds, dict) else range(len(kinds)):
        yield from _pairs(data[key], kinds[key])


def _skeleton(data: Any, kinds: Any, columns: list[torch.Tensor], entries: list[Sequence[Any]]) -> Any:
    """The structure of a batch, with what has samples in the two lists."""
    if isinstance(kinds, dict):
        return honor_mapping(data, {key: _skeleton(data[key], kinds[key], columns, entries) for key in kinds})
    if isinstance(kinds, list):
        pairs = zip(data, kinds, strict=True)
        return honor_type(data, (_skeleton(item, kind, columns, entries) for item, kind in pairs))
    if kinds == OF_BATCH:
        return data
    leaves: list[Any] = columns if kinds == COLUMN else entries
    leaves.append(data)
    return _Leaf(kinds, len(leaves) - 1)


def _leaves(data: Any) -> Iterator[Any]:
    if not isinstance(data, CONTAINERS):
        yield data
        return
    for item in data.values() if isinstance(data, Mapping) else data:
        yield from _leaves(item)
