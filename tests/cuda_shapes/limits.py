"""What the cells of the table may cost, and which of them are known to cost more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cuda_shapes.rows import ROWS

SLOT_BYTES = 8192  # what a rank announces
MANY_WAITS = 100_000
MAX_WAITS: dict[Any, int] = {
    "prepare": MANY_WAITS, "warm_up": MANY_WAITS, "get_state_dict": MANY_WAITS, "save_model": MANY_WAITS,
    "save_state": MANY_WAITS, "load_state": MANY_WAITS, "free_memory": MANY_WAITS,  # weights come from and go to the CPU
    "pad_across_processes": 1,  # the host must know the sizes of others
    "gather_object": 4,  # bytes to the device, the others' sizes, one copy back
    ("ddp-fp16", "step"): 1,  # whether gradients have overflowed
    ("fsdp1-offload", "step"): 2, ("fsdp2-offload", "step"): 2, ("fsdp2-offload-full-states", "step"): 2,  # of the norm
}  # fmt: skip
"""How often the host may wait for the device; nothing else may do so at all."""
OF_TORCH = {"fsdp1-offload", "fsdp2-offload", "fsdp2-offload-full-states"}
"""Rows in which torch itself waits in each step, because the optimizer steps on the CPU."""


@dataclass(frozen=True)
class Bytes:
    """A limit of memory: so many times what the rank keeps of the model, of the whole model, and bytes for each rank."""

    shares: float = 0.0
    models: float = 0.0
    per_rank: int = 0


FEW = 2 * SLOT_BYTES + SLOT_BYTES // 2  # announcements that are under way at once, and their copies
PLAN_BYTES = 70_000  # what torch's distributed checkpoints plan for this model, sent as an object
REPLICATED = {
    "prepare": Bytes(2.05), "warm_up": Bytes(6.0), "step": Bytes(4.0), "evaluate": Bytes(1.6, 0.0, FEW),
    "get_state_dict": Bytes(0.0, 0.05), "save_model": Bytes(0.0, 0.05, FEW), "save_state": Bytes(0.0, 0.25, FEW),
    "load_state": Bytes(2.1, 0.0, FEW),
}  # fmt: skip
SHARDED = {  # 0.4 of the model: two of its six blocks, unsharded
    "prepare": Bytes(1.0, 0.55), "warm_up": Bytes(6.0, 4.0), "step": Bytes(4.0, 4.0), "evaluate": Bytes(1.0, 1.6, FEW),
    "get_state_dict": Bytes(1.0, 0.4), "save_model": Bytes(1.0, 0.4, FEW), "save_state": Bytes(3.0, 0.4, FEW + PLAN_BYTES),
    "load_state": Bytes(2.1, 0.6, FEW),
}  # fmt: skip
SMALL = Bytes(0.0, 0.05, 2 * FEW)
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
    share = ROWS[name].own_share(world)
    limit = (REPLICATED if share >= 1 else SHARDED).get(column, SMALL)
    of_model = (limit.shares * share + limit.models) * report["note"]["model bytes"]
    return peak - int(of_model) - limit.per_rank * world


OF_ACCELERATOR = 1024
"""The loss scale and its growth tracker, which an accelerator keeps."""


def remaining_bytes(report: dict[str, Any]) -> int:
    """What a program that has freed everything leaves on the GPU."""
    before: int = report["note"]["bytes on the GPU"]
    kept: int = report["kept_bytes"]
    return max(0, before + kept - OF_ACCELERATOR)


KNOWN: list[tuple[Callable[[str, int, str], bool], str]] = [
    (
        lambda name, world, column: (
            column == "prepare" and name.startswith("fsdp1")
        ),
        "B7: under FSDP 1 an optimizer made before prepare keeps the unsharded parameters on the GPU until it is rebound",
    ),
    (
        lambda name, world, column: column == "free_memory" and name.startswith("fsdp1"),
        "torch's FSDP 1 keeps flat parameters in a cycle through autograd, also where it is used by hand",
    ),
]  # fmt: skip
"""Cells that fail today: which, and what was seen."""
