"""How ZeRO lays tensors out in flat buffers: which range of which tensor is where in the buffer of which rank.

Stages 1 and 2 join the tensors of a parameter group and give each rank one stretch of the whole; a tensor may begin on one
rank and end on another. Stage 3 gives each rank a stretch of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Shapes = Mapping[str, Sequence[int]]
"""Names of tensors with their shapes, in the order of their flat buffer."""


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A range of a flattened tensor in the flat buffer of a rank.

    Attributes:
        name: The name of the tensor.
        begin: The first of its values, in the flattened tensor.
        count: Their number, at least one.
        rank: Whose buffer.
        position: That of the first value there.
    """

    name: str
    begin: int
    count: int
    rank: int
    position: int


def joined_pieces(
    shapes: Shapes, lengths: Sequence[int], paddings: Sequence[int] | None = None
) -> Iterator[FlatPiece]:
    """The layout of stages 1 and 2: one stretch of all tensors for each rank.

    Args:
        shapes: The tensors.
        lengths: The length of each rank's buffer; the last one may lack the padding at its end.
        paddings: The number of values behind each tensor that belong to none; zeros when None.
    """
    begins = [0, *accumulate(lengths)]
    start = 0
    for index, (name, shape) in enumerate(shapes.items()):
        end = start + math.prod(shape)
        for rank, length in enumerate(lengths):
            first, last = max(start, begins[rank]), min(end, begins[rank] + length)
            if first < last:
                yield FlatPiece(name, first - start, last - first, rank, first - begins[rank])
        start = end + (paddings[index] if paddings is not None else 0)


def divided_pieces(shapes: Shapes, num_ranks: int) -> Iterator[FlatPiece]:
    """The layout of stage 3: a stretch of every tensor for each rank; the last ones may be padded.

    Args:
        shapes: The tensors.
        num_ranks: The number of ranks.
    """
    position = 0
    for name, shape in shapes.items():
        num_values = math.prod(shape)
        share = math.ceil(num_values / num_ranks)
        for rank in range(num_ranks):
            begin = rank * share
            if (count := min(share, num_values - begin)) > 0:
                yield FlatPiece(name, begin, count, rank, position)
        position += share
