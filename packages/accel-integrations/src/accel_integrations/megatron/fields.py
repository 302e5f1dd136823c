"""Fields of `MegatronLMPlugin` and arguments of Megatron-LM that this engine does not have, or has for some models only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.megatron.families.shape import ModelShape
    from accel_state.settings.megatron import MegatronLMPlugin

OFFLOADING = (
    "Optimizers are those of torch, whose states are where the parameters are",
    "Use DeepSpeed or FSDP for offloading.",
)
OWN_GROUPS = ("The optimizer is yours, with its parameter groups", "Make parameter groups of the optimizer.")
GROWING_DECAY = (
    "The optimizer is yours, with its weight decay",
    "Set weight_decay of the optimizer's parameter groups in the training loop.",
)
UNSUPPORTED = {
    "use_custom_fsdp": ("Parameters are whole on each rank of a replica", "Use FSDP for sharded parameters."),
    "optimizer_cpu_offload": OFFLOADING,
    "overlap_cpu_optimizer_d2h_h2d": OFFLOADING,
    "use_precision_aware_optimizer": (
        "Optimizers are those of torch, whose states have the dtype of the parameters",
        "Load the model in the dtype that its states should have.",
    ),
    "eod_mask_loss": ("Which tokens count is said by the labels", "Give these tokens the label -100."),
    "pipeline_model_parallel_split_rank": (
        "megatron-core has no pipeline stages for an encoder with a decoder any more",
        "Train such models with tp_degree.",
    ),
    "no_wd_decay_cond": OWN_GROUPS,
    "scale_lr_cond": OWN_GROUPS,
    "weight_decay_incr_style": GROWING_DECAY,
    "start_weight_decay": ("The optimizer is yours, with its weight decay", "Set weight_decay of the optimizer."),
    "end_weight_decay": GROWING_DECAY,
    "lr_decay_samples": ("Schedules count steps", "Set lr_decay_iters."),
    "no_load_optim": (
        "States are loaded for all prepared objects together",
        "To begin with weights alone, load them with load_checkpoint_in_model() before prepare().",
    ),
    "no_save_optim": (
        "States are saved for all prepared objects together",
        "To save the weights alone, call save_model().",
    ),
}
"""What would train otherwise than the program says is refused: why, and what to do instead."""
WITHOUT_EFFECT = {
    "consumed_samples": ("Data loaders are yours", "Call skip_first_batches() for batches that were seen."),
    "tensorboard_dir": (
        "Trackers log what you give them",
        "Pass Accelerator(log_with='tensorboard') and a project_dir.",
    ),
    "set_all_logging_options": (
        "Trackers log what you give them",
        "Pass Accelerator(log_with='tensorboard'), and log what you need.",
    ),
}
"""What trains as the program says has a warning: why it has no effect, and what to do instead."""
NOT_SET = (None, False, "constant")

OF_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file")
OF_MODEL: Mapping[str, tuple[str, ...]] = {
    "position_embedding_type": ("rope", "learned_absolute", "learned", "relative", "rotary", "absolute"),
    "attention_head_type": ("multihead", "multiquery"),
}
"""Arguments of Megatron-LM that a model's configuration decides, and their values."""
POSITIONS = {"rotary": "rope", "absolute": "learned_absolute", "learned": "learned_absolute"}
"""Other names of kinds of positions."""
NOT_OF_CONFIG = {*OF_TOKENIZER, *OF_MODEL}
"""Arguments in `other_megatron_args` that megatron-core's `TransformerConfig` does not have."""


def check_fields(plugin: MegatronLMPlugin, warn: bool = True) -> None:
    """Check that nothing is set that this engine does not have.

    Args:
        plugin: The settings of the run.
        warn: Whether this rank warns about fields without effect.

    Raises:
        NotImplementedError: A field is set that would train otherwise.
        ValueError: A field is set without another one that it needs, or an argument has a value that it cannot have.
    """
    for name, (reason, instead) in UNSUPPORTED.items():
        if (value := getattr(plugin, name)) not in NOT_SET:
            raise NotImplementedError(f"MegatronLMPlugin.{name}={value!r} is not supported. {reason}. {instead}")
    if plugin.custom_prepare_model_function is not None and plugin.custom_model_provider_function is None:
        raise ValueError(
            "custom_prepare_model_function needs custom_model_provider_function, which it is called with. Set both."
        )
    others = plugin.other_megatron_args or {}
    _check_values(others)
    if not warn:
        return
    for name, (reason, instead) in WITHOUT_EFFECT.items():
        if (value := getattr(plugin, name)) not in NOT_SET:
            warn_user(f"MegatronLMPlugin.{name}={value!r} has no effect. {reason}. {instead}")
    functions = (plugin.custom_train_step_class, plugin.custom_megatron_datasets_provider_function)
    names = [name for name in OF_TOKENIZER if name in others]
    if names and functions == (None, None):
        warn_user(
            f"{', '.join(names)} in MegatronLMPlugin.other_megatron_args have no effect: your data loader yields tokens already. "
            "Leave them out; only a custom_train_step_class gets them."
        )


def _check_values(others: Mapping[str, Any]) -> None:
    for name, values in OF_MODEL.items():
        value = others.get(name, values[0])
        if value == "alibi":
            raise NotImplementedError(
                "position_embedding_type='alibi' in MegatronLMPlugin.other_megatron_args is not supported: megatron-core has no "
                "attention with ALiBi's bias. Train a model with rotary or learned positions, or use FSDP or DeepSpeed."
            )
        if value not in values:
            raise ValueError(
                f"MegatronLMPlugin.other_megatron_args has {name}={value!r}. Choose one of {', '.join(map(repr, values))}."
            )


def check_model_arguments(others: Mapping[str, Any], shape: ModelShape) -> None:
    """Check that Megatron-LM's arguments about the kind of model say what its configuration says.

    Args:
        others: `other_megatron_args`, checked by `check_fields`.
        shape: The model.

    Raises:
        ValueError: They say something else.
    """
    positions = shape.model.get("position_embedding_type", "learned_absolute")
    asked = others.get("position_embedding_type", positions)
    if POSITIONS.get(asked, asked) != positions:
        raise ValueError(
            f"MegatronLMPlugin.other_megatron_args has position_embedding_type={asked!r}, but the model that is prepared has "
            f"{positions!r}. Leave it out, or prepare a model with such positions."
        )
    heads = others.get("attention_head_type")
    if heads == "multiquery" and shape.groups != 1:
        raise ValueError(
            f"MegatronLMPlugin.other_megatron_args has attention_head_type='multiquery', which is one head of keys and values, but "
            f"the model that is prepared has {shape.groups}. Set num_key_value_heads=1 in its configuration, or leave it out."
        )
    if heads == "multihead" and shape.groups != shape.heads:
        raise ValueError(
            f"MegatronLMPlugin.other_megatron_args has attention_head_type='multihead', but the model that is prepared has "
            f"{shape.groups} heads of keys and values for {shape.heads} attention heads. Leave it out."
        )
