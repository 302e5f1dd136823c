"""Fields of `MegatronLMPlugin` that this engine does not have, with what to do instead."""

from __future__ import annotations

from typing import Any

from accel_state.warning import warn_user

LEFT_OUT = {
    "use_custom_fsdp": "Use FSDP for sharded parameters.",
    "optimizer_cpu_offload": "Use DeepSpeed or FSDP for offloading.",
    "overlap_cpu_optimizer_d2h_h2d": "Use DeepSpeed or FSDP for offloading.",
    "use_precision_aware_optimizer": "Optimizer states have the dtype of the model.",
    "eod_mask_loss": "Give these tokens the label -100.",
    "pipeline_model_parallel_split_rank": "It is for models with an encoder and a decoder, which are not mapped.",
    "no_wd_decay_cond": "Make parameter groups of the optimizer.",
    "scale_lr_cond": "Make parameter groups of the optimizer.",
    "weight_decay_incr_style": "Set weight_decay of the optimizer's parameter groups in the training loop.",
    "start_weight_decay": "Set weight_decay of the optimizer.",
    "end_weight_decay": "Set weight_decay of the optimizer's parameter groups in the training loop.",
    "lr_decay_samples": "Set lr_decay_iters.",
    "no_load_optim": "To begin with weights alone, load them with load_checkpoint_in_model() before prepare().",
    "no_save_optim": "To save the weights alone, call save_model().",
}
"""What would train otherwise than the program says: refused."""
WITHOUT_EFFECT = {
    "consumed_samples": "Call skip_first_batches() for batches that were seen.",
    "tensorboard_dir": "Pass Accelerator(log_with='tensorboard') and a project_dir.",
    "set_all_logging_options": "Pass Accelerator(log_with='tensorboard'), and log what is wanted.",
}
"""What trains as the program says: a warning is enough."""
NOT_SET = (None, False, "constant")


def check_fields(plugin: Any, warn: bool = True) -> None:
    """Check that none of them is set.

    Args:
        plugin: A `MegatronLMPlugin`.
        warn: Whether this rank warns about fields without effect.

    Raises:
        NotImplementedError: A field is set that would train otherwise.
        ValueError: A field is set without another one that it needs.
    """
    for name, instead in LEFT_OUT.items():
        if (value := getattr(plugin, name)) not in NOT_SET:
            raise NotImplementedError(f"MegatronLMPlugin.{name}={value!r} is not supported. {instead}")
    if plugin.custom_prepare_model_function is not None and plugin.custom_model_provider_function is None:
        raise ValueError(
            "custom_prepare_model_function needs custom_model_provider_function, which it is called with. Set both."
        )
    for name, instead in WITHOUT_EFFECT.items():
        if warn and (value := getattr(plugin, name)) not in NOT_SET:
            warn_user(f"MegatronLMPlugin.{name}={value!r} has no effect. {instead}")
