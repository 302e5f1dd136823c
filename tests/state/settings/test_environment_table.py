"""Every variable the launcher hands over, with what it does; frozen, because scripts and clusters rely on it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from accel_state.enums import DynamoBackend
from accel_state.settings.option import options_of

PLACES = {
    "compile": "accel_state.settings.compile:TorchDynamoPlugin",
    "deepspeed": "accel_state.settings.deepspeed:DeepSpeedPlugin",
    "fsdp": "accel_state.settings.fsdp:FullyShardedDataParallelPlugin",
    "megatron": "accel_state.settings.megatron:MegatronLMPlugin",
    "mesh": "accel_state.mesh:ParallelismConfig",
    "cp": "accel_state.settings.parallelism:TorchContextParallelConfig",
    "sp": "accel_state.settings.parallelism:DeepSpeedSequenceParallelConfig",
    "pp": "accel_state.settings.parallelism:PipelineParallelConfig",
    "te": "accel_state.settings.fp8:TERecipeKwargs",
    "ao": "accel_state.settings.fp8:AORecipeKwargs",
    "msamp": "accel_state.settings.fp8:MSAMPRecipeKwargs",
}

# class, variable, field, value when unset, a text, the value it stands for
ROWS: list[tuple[str, str, str, Any, str, Any]] = [
    ("compile", "ACCELERATE_DYNAMO_BACKEND", "backend", DynamoBackend.NO, "EAGER", DynamoBackend.EAGER),
    ("compile", "ACCELERATE_DYNAMO_MODE", "mode", "default", "reduce-overhead", "reduce-overhead"),
    ("compile", "ACCELERATE_DYNAMO_USE_DYNAMIC", "dynamic", None, "False", False),
    ("compile", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "fullgraph", False, "True", True),
    (
        "compile",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "use_regional_compilation",
        False,
        "True",
        True,
    ),
    ("deepspeed", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", "auto", "3", 3),
    ("deepspeed", "ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "auto", "1.5", 1.5),
    ("deepspeed", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", 2, "1", 1),
    ("deepspeed", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device", "none", "cpu", "cpu"),
    ("deepspeed", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device", "none", "cpu", "cpu"),
    (
        "deepspeed",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "offload_optimizer_nvme_path",
        "none",
        "/fast",
        "/fast",
    ),
    ("deepspeed", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "offload_param_nvme_path", "none", "/fast", "/fast"),
    ("deepspeed", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "zero3_init_flag", False, "false", False),
    ("deepspeed", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "zero3_save_16bit_model", False, "true", True),
    ("deepspeed", "ACCELERATE_FP8_OPT_LEVEL", "msamp_opt_level", "O1", "O2", "O2"),
    ("msamp", "ACCELERATE_FP8_OPT_LEVEL", "opt_level", "O2", "O1", "O1"),
    ("te", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "amax_compute_algo", "most_recent", "max", "max"),
    ("te", "ACCELERATE_FP8_AMAX_HISTORY_LEN", "amax_history_len", 1024, "16", 16),
    ("te", "ACCELERATE_FP8_FORMAT", "fp8_format", "HYBRID", "E4M3", "E4M3"),
    ("te", "ACCELERATE_FP8_INTERVAL", "interval", 1, "2", 2),
    ("te", "ACCELERATE_FP8_MARGIN", "margin", 0, "3", 3),
    ("te", "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "use_autocast_during_eval", False, "true", True),
    ("te", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "use_mxfp8_block_scaling", False, "true", True),
    ("mesh", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "dp_replicate_size", 1, "2", 2),
    ("mesh", "PARALLELISM_CONFIG_DP_SHARD_SIZE", "dp_shard_size", 1, "2", 2),
    ("mesh", "PARALLELISM_CONFIG_TP_SIZE", "tp_size", 1, "2", 2),
    ("mesh", "PARALLELISM_CONFIG_CP_SIZE", "cp_size", 1, "2", 2),
    ("mesh", "PARALLELISM_CONFIG_SP_SIZE", "sp_size", 1, "2", 2),
    ("mesh", "PARALLELISM_CONFIG_PP_SIZE", "pp_size", 1, "2", 2),
    ("pp", "PARALLELISM_CONFIG_PP_SCHEDULE", "schedule", "gpipe", "1F1B", "1f1b"),
    ("pp", "PARALLELISM_CONFIG_PP_NUM_MICROBATCHES", "num_microbatches", None, "4", 4),
    ("pp", "PARALLELISM_CONFIG_PP_SPLIT_POINTS", "split_points", "auto", "h.1,h.2", ["h.1", "h.2"]),
    ("mesh", "PARALLELISM_CONFIG_CP_BACKEND", "cp_backend", "torch", "torch", "torch"),
    ("mesh", "PARALLELISM_CONFIG_SP_BACKEND", "sp_backend", "deepspeed", "deepspeed", "deepspeed"),
    ("cp", "PARALLELISM_CONFIG_CP_COMM_STRATEGY", "cp_comm_strategy", "allgather", "alltoall", "alltoall"),
    ("sp", "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "sp_seq_length_is_variable", True, "true", True),
    ("sp", "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sp_attn_implementation", None, "sdpa", "sdpa"),
    ("megatron", "MEGATRON_LM_ATTENTION_BACKEND", "attention_backend", True, "false", False),
    ("megatron", "MEGATRON_LM_ATTENTION_DROPOUT", "attention_dropout", 0.0, "0.5", 0.5),
    ("megatron", "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32", "attention_softmax_in_fp32", True, "false", False),
    ("megatron", "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS", "calculate_per_token_loss", True, "false", False),
    ("megatron", "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "context_parallel_size", 1, "2", 2),
    (
        "megatron",
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS",
        "decoder_last_pipeline_num_layers",
        None,
        "3",
        3,
    ),
    ("megatron", "MEGATRON_LM_EOD_MASK_LOSS", "eod_mask_loss", False, "true", True),
    ("megatron", "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", "expert_model_parallel_size", 1, "2", 2),
    ("megatron", "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE", "expert_tensor_parallel_size", 1, "2", 2),
    ("megatron", "MEGATRON_LM_GRADIENT_CLIPPING", "gradient_clipping", 1.0, "0.5", 0.5),
    ("megatron", "MEGATRON_LM_HIDDEN_DROPOUT", "hidden_dropout", 0.0, "0.1", 0.1),
    ("megatron", "MEGATRON_LM_NO_LOAD_OPTIM", "no_load_optim", False, "true", True),
    ("megatron", "MEGATRON_LM_NO_SAVE_OPTIM", "no_save_optim", False, "true", True),
    ("megatron", "MEGATRON_LM_NUM_MICRO_BATCHES", "num_micro_batches", 1, "4", 4),
    ("megatron", "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD", "optimizer_cpu_offload", False, "true", True),
    ("megatron", "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D", "overlap_cpu_optimizer_d2h_h2d", False, "true", True),
    ("megatron", "MEGATRON_LM_PP_DEGREE", "pp_degree", 1, "2", 2),
    ("megatron", "MEGATRON_LM_RECOMPUTE_ACTIVATIONS", "recompute_activations", False, "true", True),
    ("megatron", "MEGATRON_LM_RECOMPUTE_GRANULARITY", "recompute_granularity", "full", "selective", "selective"),
    ("megatron", "MEGATRON_LM_RECOMPUTE_METHOD", "recompute_method", "uniform", "block", "block"),
    ("megatron", "MEGATRON_LM_RECOMPUTE_NUM_LAYERS", "recompute_num_layers", 1, "2", 2),
    ("megatron", "MEGATRON_LM_SEQUENCE_PARALLELISM", "sequence_parallelism", False, "true", True),
    ("megatron", "MEGATRON_LM_TP_DEGREE", "tp_degree", 1, "2", 2),
    ("megatron", "MEGATRON_LM_USE_CUSTOM_FSDP", "use_custom_fsdp", False, "true", True),
    ("megatron", "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "use_distributed_optimizer", False, "true", True),
    ("megatron", "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER", "use_precision_aware_optimizer", False, "true", True),
    (
        "megatron",
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS",
        "use_rotary_position_embeddings",
        True,
        "false",
        False,
    ),
]
ELSEWHERE = {  # tried with the field they belong to
    "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
    "ACCELERATE_FP8_PAD_INNER_DIM", "ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD",
    "ACCELERATE_FP8_OVERRIDE_WGRAD", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
}  # fmt: skip


def class_of(key: str) -> Any:
    module, name = PLACES[key].split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_a_variable(monkeypatch: pytest.MonkeyPatch, row: tuple[str, str, str, Any, str, Any]) -> None:
    key, variable, field, unset, text, value = row
    monkeypatch.setattr("accel_state.libraries.is_transformer_engine_available", lambda: True)
    settings_class = class_of(key)
    assert getattr(settings_class(), field) == unset
    monkeypatch.setenv(variable, text)
    assert getattr(settings_class(), field) == value
    option = options_of(settings_class)[field]
    assert option.env == variable
    assert option.help


def test_no_variable_is_forgotten() -> None:
    declared = {name for key in PLACES for option in options_of(class_of(key)).values() for name in option.variables}
    tried = {row[1] for row in ROWS} | ELSEWHERE
    assert {name for name in declared - tried if not name.startswith("FSDP_")} == set()


def test_flags_are_declared_once_per_meaning() -> None:
    flags: dict[str, str | None] = {}
    for key in PLACES:
        for option in options_of(class_of(key)).values():
            if option.flag is not None:
                assert flags.setdefault(option.flag, option.env) == option.env, option.flag
