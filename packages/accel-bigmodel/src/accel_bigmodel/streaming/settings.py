"""How many blocks of offloaded weights are prefetched, and the device memory that may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_bigmodel.sizes import convert_file_size_to_int

MAX_BLOCK_BYTES = 64 << 20
"""Large enough for a bus to run at its full speed, small enough to wait for the first one."""


@dataclass(frozen=True)
class Streaming:
    """How offloaded weights, in CPU memory or on disk, are prefetched to the device on which they run.

    Args:
        depth (`int`): How many blocks are prefetched while one computes; 0 copies each when it is needed.
        budget (`int` or `str`, *optional*): Bytes of device memory, such as `"2GB"`, for the block that computes and
            those being prefetched. When None, as much as the largest `depth + 1` consecutive blocks take.

    Raises:
        ValueError: For a negative depth, or a budget that is no size.

    Example:
        ```python
        cpu_offload(model, "cuda:0", streaming=Streaming(depth=3, budget="4GB"))
        ```
    """

    depth: int = 2
    budget: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 0:
            raise ValueError(f"Streaming(depth={self.depth!r}): give the number of blocks to prefetch, 0 or more.")
        if self.budget is not None and self.budget_bytes <= 0:
            raise ValueError(f"Streaming(budget={self.budget!r}): give a number of bytes, or a size such as '2GB'.")

    @property
    def budget_bytes(self) -> int:
        """The budget; 0 when it is left open."""
        return convert_file_size_to_int(self.budget) if self.budget is not None else 0

    @property
    def block_bytes(self) -> int:
        """How large blocks become, unless a single module is larger: so that all that are prefetched fit."""
        if self.budget is None:
            return MAX_BLOCK_BYTES
        return max(1, min(MAX_BLOCK_BYTES, self.budget_bytes // (self.depth + 2)))

    def arena_bytes(self, sizes: Sequence[int]) -> int:
        """Device memory for blocks of these sizes, which run in a circle; never less than the largest takes."""
        if not sizes:
            return 0
        under_way = min(self.depth + 1, len(sizes))
        circle = [*sizes, *sizes[: under_way - 1]]
        wanted = max(sum(circle[begin : begin + under_way]) for begin in range(len(sizes)))
        return max(max(sizes), min(wanted, self.budget_bytes) if self.budget is not None else wanted)
