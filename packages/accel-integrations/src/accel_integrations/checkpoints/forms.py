"""By which names of files a checkpoint shows the engine that saved it."""

from __future__ import annotations

import re
from collections.abc import Collection

from accel_integrations.checkpoints.pending import CheckpointFiles
from accel_ops.filenames import FSDP_MODEL_NAME, MODEL_NAME

DEEPSPEED_STATES = re.compile(rf"{MODEL_NAME}(?:_\d+)?/.*_states\.pt")


def holds_deepspeed_states(names: Collection[str]) -> bool:
    """Whether there are states of DeepSpeed among the files of a checkpoint, named relative to it."""
    return any(DEEPSPEED_STATES.fullmatch(name) for name in names)


def holds_shards(names: Collection[str]) -> bool:
    """Whether the files of a checkpoint hold models in a form of sharded training."""
    return any(name.startswith(FSDP_MODEL_NAME) for name in names)


def refuse_deepspeed_states(checkpoint: CheckpointFiles) -> None:
    """Refuse a checkpoint whose states only DeepSpeed can read.

    Raises:
        ValueError: Saying how it can be loaded.
    """
    if holds_deepspeed_states(checkpoint.names):
        raise ValueError(
            f"The checkpoint {checkpoint.folder} was saved under DeepSpeed: load it with a DeepSpeedPlugin, or make plain "
            "weights of it with the zero_to_fp32.py in it."
        )
