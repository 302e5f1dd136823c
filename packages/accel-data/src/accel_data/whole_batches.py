"""BatchScatter of batches that cannot be joined and cut, because their rows differ in length: each process gets one whole."""

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


def deal_out(batches: Sequence[Any], count: int, is_last: bool, drop_last: bool) -> list[Any] | None:
    """One batch for each of `count` processes.

    In the last round a short batch is filled up with its own samples and a missing one replaced by the first, so that
    the real samples come first; with `drop_last` all are cut to the shortest instead.

    Args:
        batches: Those of the round, nested tensors; fewer than `count` only in the last round.
        count: Processes.
        is_last: Whether the data end with this round.
        drop_last: Leave out what would have to be filled up.

    Returns:
        The batches, or None when nothing is left of the round.

    Raises:
        ValueError: When a batch before the last one is short, so that filling up would mix real and repeated samples.
    """
    sizes = [find_batch_size(batch) or 0 for batch in batches]
    if not is_last or (len(batches) == count and len(set(sizes)) == 1):
        return list(batches)
    if drop_last:
        return [slice_tensors(batch, slice(0, min(sizes))) for batch in batches] if len(batches) == count else None
    size = sizes[0]
    if any(other != size for other in sizes[:-1]) or sizes[-1] > size:
        raise ValueError(
            f"The last round has batches of {sizes} samples whose rows differ in length, so they cannot be joined and "
            "shared out evenly: let only the very last batch be short, or pad all batches to one length."
        )
    whole = concatenate([batches[-1]] * -(-size // sizes[-1]))
    dealt = [*batches[:-1], slice_tensors(whole, slice(0, size))]
    return dealt + [batches[0]] * (count - len(dealt))
