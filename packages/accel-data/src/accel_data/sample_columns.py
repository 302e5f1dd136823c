"""The samples of dispatched batches: batches are joined, and each rank gets its part of every leaf that has samples.

A leaf with one entry for each sample is split: a tensor of shape (samples, ...), a list of strings, numbers or images of different
sizes. Any other, such as a name or a 0-dim tensor, is of the batch as a whole: each rank gets all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from accel_ops.batches import concatenate, find_batch_size
from accel_ops.nested import flatten, honor_mapping, honor_type

CONTAINERS = (list, tuple, Mapping)


class ProgramSlices:
    """Splits batches of nested tensors by a function of the program.

    Args:
        slice_fn: Called as `slice_fn(batch, slice, process_index=..., num_processes=...)`.
    """

    kinds: Any = None
    splits_all = True
    """Whether batches are joined and split, too, where there is one for each process already."""

    def __init__(self, slice_fn: Callable[..., Any]) -> None:
        self._slice_fn = slice_fn

    def size(self, batch: Any) -> int:
        """The samples of a batch."""
        return find_batch_size(batch) or 0

    def part(self, batch: Any, begin: int, end: int, index: int, count: int) -> Any:
        """The samples of a batch from `begin` to `end`, for process `index` of `count`."""
        return self._slice_fn(batch, slice(begin, end), process_index=index, num_processes=count)

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch with the samples of all.

        Raises:
            ValueError: One has a 0-dim tensor, which has no rows.
        """
        try:
            return batches[0] if len(batches) == 1 else concatenate(batches)
        except RuntimeError as error:
            if all(leaf.ndim for batch in batches for leaf in flatten(batch, "the dispatching data loader")[0]):
                raise
            raise ValueError(
                "dispatch_batches=True concatenates batches and splits them by samples, and a batch has a 0-dim tensor. "
                "Give it a value for each sample, or set dispatch_batches=False."
            ) from error

    def rows_differ(self, batches: Sequence[Any]) -> bool:
        """Whether batches of one structure hold rows of different shapes, as padding to the longest row makes them."""
        if len(batches) == 1:
            return False
        flat = [flatten(batch, "the dispatching data loader") for batch in batches]
        shapes = {tuple(leaf.shape[1:] for leaf in leaves) for leaves, _ in flat}
        return len(shapes) > 1 and len({structure for _, structure in flat}) == 1


class SampleColumns:
    """Splits batches of any structure; which leaves have samples is learned from the first, so that a short one is not mistaken.

    Args:
        batch_size: Samples of a full batch; None where only the batches say it.

    Attributes:
        kinds: Whether a leaf has samples, for each, in the structure of a batch; another object once another structure came.
    """

    splits_all = False

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self.kinds: Any = None

    def size(self, batch: Any) -> int:
        """The samples of a batch.

        Raises:
            ValueError: It is not certain which leaves of it have one entry for each sample.
        """
        if self.kinds is None or not _fits(batch, self.kinds):
            self._learn(batch)
        sizes = [(not isinstance(leaf, torch.Tensor), len(leaf)) for leaf in _with_samples(batch, self.kinds)]
        return min(sizes)[1]  # a tensor's, where there is one

    def part(self, batch: Any, begin: int, end: int, index: int, count: int) -> Any:
        """The samples of a batch from `begin` to `end`."""
        return _mapped(lambda leaves: leaves[0][begin:end], self.kinds, [batch])

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch with the samples of all, and what the first one has as a whole."""
        return batches[0] if len(batches) == 1 else _mapped(_joined, self.kinds, batches)

    def rows_differ(self, batches: Sequence[Any]) -> bool:
        """Whether tensors hold rows of different shapes, as padding to the longest row makes them."""
        if len(batches) == 1 or not all(_fits(batch, self.kinds) for batch in batches):
            return False
        leaves = (_with_samples(batch, self.kinds) for batch in batches)
        return len({tuple(leaf.shape[1:] for leaf in of if isinstance(leaf, torch.Tensor)) for of in leaves}) > 1

    def _learn(self, batch: Any) -> None:
        """Learn from the first batch, or from one that shows that a list has samples, because it is shorter than the one before."""
        kinds = None if self.kinds is None else _corrected(batch, self.kinds)
        if kinds is None or not _fits(batch, kinds):
            kinds = _kinds_in(batch, self._likely_size(batch))
        if not _with_samples(batch, kinds):
            raise _uncertain(batch, "no leaf that has samples")
        self.kinds = kinds

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


# ---- learning from a batch ------------------------------------------------------------------------------------------


def _kinds_in(data: Any, size: int) -> Any:
    """Whether a leaf has samples, for each leaf of a batch of that many, in its structure.

    Raises:
        ValueError: A list could be one of samples as well as one of lists of samples.
    """
    if isinstance(data, torch.Tensor):
        return data.ndim > 0 and data.shape[0] == size
    if isinstance(data, Mapping):
        return {key: _kinds_in(value, size) for key, value in data.items()}
    if not isinstance(data, (list, tuple)):
        return False
    if len(data) == size and not hasattr(data, "_fields") and _is_list_of_samples(data, size):
        return True
    if not any(isinstance(item, (torch.Tensor, *CONTAINERS)) for item in data):
        return False
    return [_kinds_in(item, size) for item in data]


def _is_list_of_samples(data: Sequence[Any], size: int) -> bool:
    """Whether a list as long as the batch has an entry for each sample, and is no structure of as many leaves.

    Samples are of one kind, except those that are None: numbers and strings, tensors of one dtype and number of dimensions, mappings of the
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
            return True
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
        is_like = isinstance(data, Mapping) and kinds.keys() == data.keys()
        return is_like and all(_fits(data[key], kind) for key, kind in kinds.items())
    if isinstance(kinds, list):
        return isinstance(data, (list, tuple)) and len(data) == len(kinds) and all(map(_fits, data, kinds))
    return not kinds or (data.ndim > 0 if isinstance(data, torch.Tensor) else isinstance(data, (list, tuple)))


def _with_samples(data: Any, kinds: Any) -> list[Any]:
    """The leaves that have samples."""
    if isinstance(kinds, bool):
        return [data] if kinds else []
    pairs = ((data[key], kinds[key]) for key in kinds) if isinstance(kinds, dict) else zip(data, kinds, strict=True)
    return [leaf for item, kind in pairs for leaf in _with_samples(item, kind)]


def _mapped(function: Callable[[Sequence[Any]], Any], kinds: Any, batches: Sequence[Any]) -> Any:
    """A structure like the first batch's, with what a function makes of the leaves that have samples, of all batches."""
    first = batches[0]
    if isinstance(kinds, dict):
        values = {key: _mapped(function, kind, [batch[key] for batch in batches]) for key, kind in kinds.items()}
        return honor_mapping(first, values)
    if isinstance(kinds, list):
        items = zip(*batches, strict=True)
        return honor_type(first, (_mapped(function, kind, of) for kind, of in zip(kinds, items, strict=True)))
    return function(batches) if kinds else first


def _joined(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    return torch.cat(list(leaves)) if isinstance(first, torch.Tensor) else honor_type(first, chain(*leaves))


# ---- batches that cannot be joined ----------------------------------------------------------------------------------


def pad_ragged(
    samples: SampleColumns | ProgramSlices, batches: Sequence[Any], count: int, is_last: bool, drop_last: bool
) -> list[Any] | None:
    """One batch for each of `count` processes, from batches that cannot be concatenated.

    At the end of the data a short batch is padded with its own samples and a missing one replaced by the first, so that
    the real samples come first; with `drop_last` all are truncated to the shortest instead.

    Args:
        samples: Splits and joins them.
        batches: The batches of a global batch, fewer than `count` only at the end of the data.
        count: The number of processes.
        is_last: Whether this is the last global batch.
        drop_last: Drop the remainder instead of padding it.

    Returns:
        The batches, or None when nothing is left.

    Raises:
        ValueError: When a batch before the last one is short, so that padding would mix real and repeated samples.
    """
    sizes = list(map(samples.size, batches))
    if not is_last or (len(batches) == count and len(set(sizes)) == 1):
        return list(batches)
    if drop_last:
        parts = [samples.part(batch, 0, min(sizes), index, count) for index, batch in enumerate(batches)]
        return parts if len(batches) == count else None
    size = sizes[0]
    if any(other != size for other in sizes[:-1]) or sizes[-1] > size:
        raise ValueError(
            f"The last global batch is made of batches of {sizes} samples whose rows differ in length, so they cannot be "
            "concatenated and split evenly. Let only the very last batch be short, or pad all batches to one length."
        )
    repeated = samples.join([batches[-1]] * -(-size // sizes[-1]))
    padded = [*batches[:-1], samples.part(repeated, 0, size, len(batches) - 1, count)]
    return padded + [batches[0]] * (count - len(padded))
