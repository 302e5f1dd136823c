"""Fields of `MegatronLMPlugin` that are refused, with what to do instead."""

from __future__ import annotations

from typing import Any

LEFT_OUT = {
    "use_custom_fsdp": "Use FSDP for sharded parameters.",
    "optimizer_cpu_offload": "Use DeepSpeed or FSDP for offloading.",
    "overlap_cpu_optimizer_d2h_h2d": "Use DeepSpeed or FSDP for offloading.",
    "use_precision_aware_optimizer": "Optimizer states have the dtype of the model.",
    "eod_mask_loss": "Give these tokens the label -100.",
    "megatron_dataset_flag": "Pass an ordinary DataLoader to prepare(), or set custom_megatron_datasets_provider_function.",
    "pipeline_model_parallel_split_rank": "It is for models with an encoder and a decoder, which are not mapped.",
    "no_wd_decay_cond": "Make parameter groups of the optimizer.",
    "scale_lr_cond": "Make parameter groups of the optimizer.",
}


def check_fields(plugin: Any) -> None:
    """Check that none of them is set.

    Raises:
        NotImplementedError: One is.
    """
    for name, instead in LEFT_OUT.items():
        if (value := getattr(plugin, name)) not in (None, False):
            raise NotImplementedError(f"MegatronLMPlugin.{name}={value!r} is not supported. {instead}")
