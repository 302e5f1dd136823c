"""The batches of a global one: whether they can be concatenated, and how the last ones are padded where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_ops.batches import concatenate, find_batch_size, slice_tensors
from accel_ops.nested import flatten


def rows_differ(batches: Sequence[Any]) -> bool:
    """Whether batches of the same structure hold rows of different shapes, as padding to the longest row makes them.

    Args:
        batches: Nested tensors of shape (samples, ...).
    """
    if len(batches) == 1:
        return False
    shapes, structures = set(), set()
    for batch in batches:
        leaves, structure = flatten(batch, "the dispatching data loader")
        structures.add(structure)
        shapes.add(tuple(leaf.shape[1:] for leaf in leaves))
    return len(structures) == 1 and len(shapes) > 1


def join_batches(batches: list[Any]) -> Any:
    """One batch with the samples of all.

    Raises:
        ValueError: One has a 0-dim tensor, which has no rows.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return concatenate(batches)
    except RuntimeError as error:
        if all(leaf.ndim for batch in batches for leaf in flatten(batch, "the dispatching data loader")[0]):
            raise
        raise ValueError(
            "dispatch_batches=True concatenates batches and splits them by samples, and a batch has a 0-dim tensor. "
            "Give it a value for each sample, or set dispatch_batches=False."
        ) from error


def pad_ragged(batches: Sequence[Any], count: int, is_last: bool, drop_last: bool) -> list[Any] | None:
    """One batch for each of `count` processes, from batches that cannot be concatenated.

    At the end of the data a short batch is padded with its own samples and a missing one replaced by the first, so that
    the real samples come first; with `drop_last` all are truncated to the shortest instead.

    Args:
        batches: The batches of a global batch, nested tensors; fewer than `count` only at the end of the data.
        count: The number of processes.
        is_last: Whether this is the last global batch.
        drop_last: Drop the remainder instead of padding it.

    Returns:
        The batches, or None when nothing is left.

    Raises:
        ValueError: When a batch before the last one is short, so that padding would mix real and repeated samples.
    """
    sizes = [find_batch_size(batch) or 0 for batch in batches]
    if not is_last or (len(batches) == count and len(set(sizes)) == 1):
        return list(batches)
    if drop_last:
        return [slice_tensors(batch, slice(0, min(sizes))) for batch in batches] if len(batches) == count else None
    size = sizes[0]
    if any(other != size for other in sizes[:-1]) or sizes[-1] > size:
        raise ValueError(
            f"The last global batch is made of batches of {sizes} samples whose rows differ in length, so they cannot be "
            "concatenated and split evenly. Let only the very last batch be short, or pad all batches to one length."
        )
    repeated = concatenate([batches[-1]] * -(-size // sizes[-1]))
    padded = [*batches[:-1], slice_tensors(repeated, slice(0, size))]
    return padded + [batches[0]] * (count - len(padded))
