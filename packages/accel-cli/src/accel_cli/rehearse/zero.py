"""ZeRO by formulas: DDP is rehearsed, and the memory and the collectives of DeepSpeed are computed from that.

Rajbhandari et al., arXiv:1910.02054, section 5, has the memory of model states. Buffers and collectives are those of DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_cli.estimate.training_report import GRADIENTS, OPTIMIZER, PARAMETERS, WEIGHT_COPIES
from accel_cli.launch.plan import is_on
from accel_cli.rehearse.result import COMMUNICATION, HOST, UPDATES, Exchange

SWITCH = "ACCELERATE_USE_DEEPSPEED"
SHARDED = {0: (), 1: (OPTIMIZER,), 2: (OPTIMIZER, GRADIENTS), 3: (OPTIMIZER, GRADIENTS, PARAMETERS)}
COLLECTIVES = {
    0: ("all-reduce",),
    1: ("all-reduce", "all-gather"),
    2: ("all-reduce", "all-gather"),
    3: ("all-gather", "all-gather", "reduce-scatter"),
}
"""In place of the all-reduce of gradients. Stages 1 and 2 reduce buckets that belong to several ranks in one all-reduce."""

DEFAULTS = {"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}  # values, in DeepSpeed's configuration


@dataclass(frozen=True, slots=True)
class Zero:
    """DeepSpeed's settings that decide where memory is.

    Attributes:
        stage: 0 to 3.
        num_ranks: The number of ranks, which divides what is sharded.
        itemsize: Bytes of a parameter: 2 where the model is in 16 bits.
        bucket: The number of gradients in the buffer of a reduction.
        max_live: The number of parameters that are gathered at a time (stage 3).
        offload_optimizer: Whether the optimizer's states are on the host.
        offload_parameters: Whether parameters are on the host (stage 3).
    """

    stage: int
    num_ranks: int
    itemsize: int = 4
    bucket: float = DEFAULTS["reduce_bucket_size"]
    max_live: float = DEFAULTS["stage3_max_live_parameters"]
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def note(self) -> str:
        """What the report says of it."""
        return f"ZeRO {self.stage}: DDP was rehearsed, and DeepSpeed's memory and collectives computed from it"

    def memory(self, live: Mapping[str, int]) -> dict[str, int]:
        """The memory of a rank.

        Args:
            live: Kind of memory -> bytes under DDP, with parameters in float32.
        """
        scale = self.itemsize / 4
        shards = {kind: self.num_ranks for kind in SHARDED[self.stage]}
        parameters, optimizer = live.get(PARAMETERS, 0), live.get(OPTIMIZER, 0)
        gradients = max(live.get(GRADIENTS, 0), live.get(COMMUNICATION, 0))  # DDP's are views of what is reduced
        buffers = self.bucket * self.itemsize if self.stage else scale * gradients
        if self.stage == 3:
            buffers += min(self.max_live * self.itemsize, scale * parameters)
        held = {
            PARAMETERS: scale * parameters / shards.get(PARAMETERS, 1),
            GRADIENTS: scale * gradients / shards.get(GRADIENTS, 1),
            OPTIMIZER: (optimizer + (parameters if optimizer else 0))
            / shards.get(OPTIMIZER, 1),  # with a float32 copy
            UPDATES: live.get(UPDATES, 0) / shards.get(OPTIMIZER, 1),
            COMMUNICATION: buffers,
            WEIGHT_COPIES: 0,
            HOST: live.get(HOST, 0),
        }
        moved = {
            OPTIMIZER: self.offload_optimizer,
            UPDATES: self.offload_optimizer,
            PARAMETERS: self.offload_parameters,
        }
        for kind, is_moved in moved.items():
            if is_moved:
                held[HOST] += held[kind]
                held[kind] = 0
        return {**live, **{kind: round(num_bytes) for kind, num_bytes in held.items()}}

    def exchanges(self, of_ddp: list[Exchange]) -> list[Exchange]:
        """The collectives of a step.

        Args:
            of_ddp: Those of DDP, with gradients in float32.
        """
        exchanges = []
        for exchange in of_ddp:
            if exchange.name == "all-reduce" and exchange.in_background:
                num_bytes = exchange.num_bytes * self.itemsize // 4
                exchanges += [replace(exchange, name=name, num_bytes=num_bytes) for name in COLLECTIVES[self.stage]]
            else:
                exchanges.append(exchange)
        return exchanges


def zero_from_environment(num_ranks: int) -> Zero | None:
    """Take DeepSpeed out of the environment, so that the script trains with DDP.

    Args:
        num_ranks: The number of ranks.

    Returns:
        DeepSpeed's settings; None if it was not in the environment.
    """
    if not is_on(os.environ.pop(SWITCH, None)):
        return None
    from accel_state.settings.deepspeed import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()

    def setting(name: str, default: Any) -> Any:
        value = plugin.get_value(f"zero_optimization.{name}")
        return default if value in (None, "auto") else value

    if (precision := plugin.mixed_precision_in_use()) != "no":  # the script's `Accelerator` would take it from there
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    halves = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() in ("bf16", "fp16")
    bucket, max_live = (float(setting(name, default)) for name, default in DEFAULTS.items())
    return Zero(
        plugin.zero_stage, num_ranks, 2 if halves else 4, bucket, max_live,
        offload_optimizer=setting("offload_optimizer.device", "none") != "none",
        offload_parameters=setting("offload_param.device", "none") != "none" and plugin.zero_stage == 3,
    )  # fmt: skip


__all__ = ["Zero", "zero_from_environment"]
