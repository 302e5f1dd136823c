"""What the cells of the table may cost, and which of them are known to cost more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cuda_shapes.rows import ROWS

SLOT_BYTES = 8192  # what a rank announces
MANY_WAITS = 100_000
MAX_WAITS: dict[Any, int] = {
    "prepare": MANY_WAITS, "warm_up": MANY_WAITS, "get_state_dict": MANY_WAITS, "save_model": MANY_WAITS,
    "save_state": MANY_WAITS, "load_state": MANY_WAITS,  # weights come from and go to the CPU
    "pad_across_processes": 1,  # the host must know the sizes of others
    "gather_object": 4,  # bytes to the device, the others' sizes, one copy back
    ("ddp fp16", "step"): 1,  # whether gradients have overflowed
    ("fsdp1 offload", "step"): 2, ("fsdp2 offload", "step"): 2, ("fsdp2 offload, full states", "step"): 2,  # of the norm
}  # fmt: skip
"""How often the host may wait for the device; nothing else may do so at all."""
OF_TORCH = {"fsdp1 offload", "fsdp2 offload", "fsdp2 offload, full states"}
"""Rows in which torch itself waits in each step, because the optimizer steps on the CPU."""
BLOCK = 0.17  # of the model: one of six
OVER_SHARE = {  # multiples of the model's bytes, above what the rank keeps
    "prepare": 1.05, "warm_up": 6.0, "step": 4.0, "evaluate": 1.6, "get_state_dict": 0.05, "save_model": 0.05,
    "save_state": 0.05, "load_state": 2.1,
}  # fmt: skip
OVER_SHARE_OF_SHARDED = OVER_SHARE | {
    "prepare": 2.1 * BLOCK, "get_state_dict": 2.1 * BLOCK, "save_model": 2.1 * BLOCK, "save_state": 2.1 * BLOCK,
    "load_state": 1.0,
}  # fmt: skip
TIMES_DATA = {"gather_large": 1.75, "gather_nested": 2.0, "reduce_many": 3.1}
"""At the peak, with the data given and returned, in multiples of the bytes returned."""


def local_rank_of(world: int) -> int:
    """The GPU of the rank that is played."""
    return min(world - 1, 3)


def waits_of(name: str, column: str, report: dict[str, Any]) -> list[str]:
    """The waits that count."""
    waits: list[str] = report["waits"]
    if name in OF_TORCH and column == "step":
        return [wait for wait in waits if " at accel" in wait]
    return waits


def excess_bytes(name: str, world: int, column: str, report: dict[str, Any]) -> int:
    """By how much the peak is over the limit; negative when it is below."""
    peak: int = report["peak_bytes"]
    if column in TIMES_DATA:
        return peak - int(TIMES_DATA[column] * report["note"]["bytes"] + 4 * SLOT_BYTES * world)
    row = ROWS[name]
    share = row.own_share(world)
    over = (OVER_SHARE if share >= 1 else OVER_SHARE_OF_SHARDED).get(column, 0.05)
    new = share if column == "prepare" else 0.0
    return peak - int((new + over) * report["note"]["model bytes"] + 4 * SLOT_BYTES * world)


def _several(name: str, world: int) -> bool:
    return world > 1


KNOWN: list[tuple[Callable[[str, int, str], bool], str]] = []
"""Cells that fail today: which, and what was seen."""
