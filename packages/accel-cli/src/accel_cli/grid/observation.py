"""What is recorded of a script, and what is changed about it so that its runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BATCH_MULTIPLE = 12  # which 1, 2, 3 and 4 ranks can share
ENGINE_ARGUMENTS = (
    "fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config", "deepspeed_plugins", "engine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observation:
    """The settings of `accel_cli.grid.observe`, which reads them as JSON. The defaults are those of the grid.

    Attributes:
        folder: For the records of the ranks.
        num_steps: After how many optimizer steps the script ends.
        batch_size: Of all ranks together; None rounds the script's own up to a multiple of `BATCH_MULTIPLE`.
        arguments: For `Accelerator`, in the place of the script's own.
        left_out: Arguments of the script's `Accelerator` that do not count.
        is_module: Whether the script is the name of a module.
    """

    folder: str
    num_steps: int = 4
    batch_size: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"mixed_precision": "no", "cpu": True})
    left_out: tuple[str, ...] = ENGINE_ARGUMENTS
    is_module: bool = False

    def global_batch_size(self, own: int) -> int:
        """The batch size of all ranks together, for a loader whose own is given."""
        return self.batch_size or -(-own // BATCH_MULTIPLE) * BATCH_MULTIPLE
