"""Which values the keys of a settings file may have, where the launch option alone does not say it."""

from __future__ import annotations

from typing import Any

from accel_cli.errors import did_you_mean
from accel_state.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

TRUTH = ("true", "false")
DEVICES = ("none", "cpu", "nvme")

# words besides these that programs have written for the same
SAME = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}

WORDS: dict[str, tuple[str, ...]] = {
    "zero_stage": ("0", "1", "2", "3"),
    "offload_optimizer_device": DEVICES,
    "offload_param_device": DEVICES,
    "zero3_init_flag": TRUTH,
    "zero3_save_16bit_model": TRUTH,
    "deepspeed_multinode_launcher": tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
    "fsdp_offload_params": TRUTH,
    "fsdp_sharding_strategy": tuple(FSDP_SHARDING_STRATEGY),
    "fsdp_reshard_after_forward": (*TRUTH, *FSDP_SHARDING_STRATEGY),
    "fsdp_auto_wrap_policy": tuple(FSDP_AUTO_WRAP_POLICY),
    "fsdp_backward_prefetch": tuple(FSDP_BACKWARD_PREFETCH),
    "fsdp_state_dict_type": tuple(FSDP_STATE_DICT_TYPE),
    "fsdp_forward_prefetch": TRUTH,
    "fsdp_use_orig_params": TRUTH,
    "fsdp_cpu_ram_efficient_loading": TRUTH,
    "fsdp_sync_module_states": TRUTH,
    "fsdp_activation_checkpointing": TRUTH,
    "fsdp_activation_checkpointing_offload": TRUTH,
    "parallelism_config_cp_comm_strategy": ("allgather", "alltoall"),
    "megatron_lm_sequence_parallelism": TRUTH,
    "megatron_lm_recompute_activations": TRUTH,
    "megatron_lm_use_distributed_optimizer": TRUTH,
}


def check_word(name: str, value: Any, where: str) -> None:
    """Refuse a value that is not one of an option's words.

    Args:
        name: The option. One without a row may have any value.
        value: What stands in the file; None stands for nothing.
        where: The file, line and key, for the message.

    Raises:
        ValueError: When the value is not one of the words, in any case.
    """
    words = WORDS.get(name)
    if words is None or value is None or value == "":
        return
    spelling = str(value).lower()
    allowed = [word.lower() for word in words]
    if spelling not in allowed and SAME.get(spelling) not in allowed:
        hint = did_you_mean(spelling.upper() if words[-1].isupper() else spelling, list(words))
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(words)}.{hint}")
