"""How many blocks of offloaded weights are prefetched, and the device memory that may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_bigmodel.sizes import convert_file_size_to_int

MAX_BLOCK_BYTES = 64 << 20
"""Large enough for the full bandwidth of a bus, small enough that waiting for the first block is short."""


@dataclass(frozen=True)
class Streaming:
    """How offloaded weights, in CPU memory or on disk, are prefetched to the device on which they run.

    Args:
        depth (`int`): How many blocks are prefetched while one computes; 0 copies each when it is needed.
        budget (`int` or `str`, *optional*): Bytes of device memory, such as `"2GB"`, for the block that computes and
            those being prefetched. When None, as much as the largest `depth + 1` consecutive blocks take.

    Raises:
        ValueError: For a negative depth, or a budget that is not a size.

    Example:
        ```python
        cpu_offload(model, "cuda:0", streaming=Streaming(depth=3, budget="4GB"))
        ```
    """

    depth: int = 2
    budget: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 0:
            raise ValueError(
                f"Streaming(depth={self.depth!r}): depth must be the number of blocks to prefetch, 0 or more."
            )
        if self.budget is not None and self.budget_bytes <= 0:
            raise ValueError(
                f"Streaming(budget={self.budget!r}): budget must be a number of bytes, or a size such as '2GB'."
            )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; 0 when it is None."""
        return convert_file_size_to_int(self.budget) if self.budget is not None else 0

    @property
    def block_bytes(self) -> int:
        """Target size of a block in bytes, so that all prefetched blocks fit into the budget; single modules may be larger."""
        if self.budget is None:
            return MAX_BLOCK_BYTES
        return max(1, min(MAX_BLOCK_BYTES, self.budget_bytes // (self.depth + 2)))

    def arena_bytes(self, sizes: Sequence[int]) -> int:
        """Device memory for blocks of these sizes, which run cyclically; never less than the largest block."""
        if not sizes:
            return 0
        num_held = min(self.depth + 1, len(sizes))
        cycle = [*sizes, *sizes[: num_held - 1]]
        window_bytes = max(sum(cycle[begin : begin + num_held]) for begin in range(len(sizes)))
        return max(max(sizes), min(window_bytes, self.budget_bytes) if self.budget is not None else window_bytes)
