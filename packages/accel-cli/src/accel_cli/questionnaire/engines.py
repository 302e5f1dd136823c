"""Questions about engines: FSDP, DeepSpeed, Megatron-LM, and combined parallelism."""

from __future__ import annotations

from math import prod
from typing import Any

from accel_cli.questionnaire.answer import Choice, Number, Path, Text, Truth, choice
from accel_cli.questionnaire.machine import by_hostfile, on_several_machines
from accel_cli.questionnaire.question import Answers, Condition, Question, Topic, about, every, opposite, said
from accel_state.constants import DEEPSPEED_MULTINODE_LAUNCHERS, FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY

VERSIONS = Choice(((2, "fully_shard, the newer one (version 2)"), (1, "FullyShardedDataParallel (version 1)")))
POLICIES = choice(
    *FSDP_AUTO_WRAP_POLICY,
    TRANSFORMER_BASED_WRAP="TRANSFORMER_BASED_WRAP: the blocks of a transformer",
    SIZE_BASED_WRAP="SIZE_BASED_WRAP: modules above a size",
    NO_WRAP="NO_WRAP: the model as one unit",
)
in_version_1, in_version_2 = said("fsdp_version", 1), said("fsdp_version", 2)


def is_synced(value: bool, answers: Answers) -> str:
    """Reject weights that only rank 0 has."""
    alone = answers["fsdp_cpu_ram_efficient_loading"] and not value
    return "Weights that only rank 0 loads must be broadcast to the other ranks." if alone else ""


FSDP = Topic(
    "Fully sharded data parallelism",
    (
        about("fsdp_version", 2, kind=VERSIONS),
        about("fsdp_sharding_strategy", "FULL_SHARD", in_version_1),
        about("fsdp_reshard_after_forward", True, in_version_2, kind=Truth(),
              text="Reshard parameters after the forward pass? Less memory, slower"),
        about("fsdp_offload_params", False),
        about("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", kind=POLICIES),
        Question("knows_blocks", "Wrap the block classes that the model declares (_no_split_modules)?", Truth(), True,
                 said("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"), is_saved=False),
        about("fsdp_transformer_layer_cls_to_wrap", None, lambda answers: answers.get("knows_blocks") is False),
        about("fsdp_min_num_params", 100_000_000, said("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
              kind=Number(least=1)),
        about("fsdp_backward_prefetch", "BACKWARD_PRE", in_version_1),
        about("fsdp_state_dict_type", "FULL_STATE_DICT", in_version_1),
        about("fsdp_state_dict_type", "SHARDED_STATE_DICT", in_version_2, kind=choice(*FSDP2_STATE_DICT_TYPE)),
        about("fsdp_forward_prefetch", False, in_version_1),
        about("fsdp_use_orig_params", True, in_version_1),
        about("fsdp_cpu_ram_efficient_loading", True),
        about("fsdp_sync_module_states", True, in_version_1, wrong=is_synced),
        about("fsdp_activation_checkpointing", False),
        about("fsdp_activation_checkpointing_offload", False,
              every(in_version_2, said("fsdp_activation_checkpointing"))),
    ),
    section="fsdp_config",
    asked_when=said("way", "FSDP"),
)  # fmt: skip

STAGES = Choice(
    (
        (0, "nothing (stage 0)"),
        (1, "the optimizer's state (stage 1)"),
        (2, "gradients, too (stage 2)"),
        (3, "parameters, too (stage 3)"),
    )
)
PLACES = Choice((("none", "none"), ("cpu", "CPU memory"), ("nvme", "NVMe disk")))
LAUNCHERS = choice(*DEEPSPEED_MULTINODE_LAUNCHERS, standard="standard: `accelerate launch` is run on every machine")

by_choices: Condition = opposite(said("has_deepspeed_file"))

DEEPSPEED = Topic(
    "DeepSpeed",
    (
        Question("has_deepspeed_file", "Have you got a DeepSpeed JSON file to use?", Truth(), False, is_saved=False),
        about("deepspeed_config_file", None, said("has_deepspeed_file"), kind=Path()),
        about("zero_stage", 2, by_choices, kind=STAGES),
        about("offload_optimizer_device", "none", every(by_choices, said("zero_stage", 2, 3)), kind=PLACES),
        about("offload_optimizer_nvme_path", None, said("offload_optimizer_device", "nvme"), kind=Path()),
        about("offload_param_device", "none", every(by_choices, said("zero_stage", 3)), kind=PLACES),
        about("offload_param_nvme_path", None, said("offload_param_device", "nvme"), kind=Path()),
        about("gradient_accumulation_steps", 1, by_choices),
        Question("clips_gradients", "Clip gradients by their norm?", Truth(), False, by_choices, is_saved=False),
        about("gradient_clipping", 1.0, said("clips_gradients")),
        about("zero3_save_16bit_model", False, every(by_choices, said("zero_stage", 3))),
        about("zero3_init_flag", lambda answers: answers.get("zero_stage") == 3,
              lambda answers: bool(answers["has_deepspeed_file"]) or answers["zero_stage"] == 3),
        Question("has_experts", "Has the model mixture-of-experts layers?", Truth(), False, is_saved=False),
        about("deepspeed_moe_layer_cls_names", None, said("has_experts")),
        about("deepspeed_multinode_launcher", "pdsh", on_several_machines, kind=LAUNCHERS,
              text="How are processes started on the other machines?"),
        about("deepspeed_hostfile", None,
              every(by_hostfile, opposite(said("deepspeed_multinode_launcher", "slurm"))), kind=Path()),
        about("deepspeed_exclusion_filter", None, by_hostfile, is_required=False,
              text="Machines or GPUs to leave out, as in host1@host2:0,1; nothing for none"),
        about("deepspeed_inclusion_filter", None,
              lambda answers: by_hostfile(answers) and not answers["deepspeed_exclusion_filter"], is_required=False,
              text="Or machines or GPUs to use alone, as in host1@host2:0,1; nothing for all"),
    ),
    section="deepspeed_config",
    asked_when=said("way", "DEEPSPEED"),
)  # fmt: skip

MEGATRON_PREFIX = "megatron_lm_"


def _megatron(name: str, default: Any = None, *more: Any, **rest: Any) -> Question:
    return about(f"{MEGATRON_PREFIX}{name}", default, *more, **rest)


def _more(name: str, default: Any = None, **rest: Any) -> Question:
    """Row of an option that few need: left out if the answer is empty."""
    return _megatron(name, default, said("sets_more"), is_required=False, **rest)


def divides_processes(value: int, answers: Answers) -> str:
    """Reject degrees by which the number of processes is not divisible."""
    degree = value * answers.get(f"{MEGATRON_PREFIX}tp_degree", 1)
    rest = answers["num_processes"] % degree
    return f"The number of processes, {answers['num_processes']}, is not divisible by {degree}." if rest else ""


MEGATRON_LM = Topic(
    "Megatron-LM",
    (
        _megatron("tp_degree", 1, wrong=divides_processes),
        _megatron("sequence_parallelism", True, lambda answers: answers[f"{MEGATRON_PREFIX}tp_degree"] > 1),
        _megatron("pp_degree", 1, wrong=divides_processes),
        _megatron("num_micro_batches", 1, lambda answers: answers[f"{MEGATRON_PREFIX}pp_degree"] > 1),
        _megatron("recompute_activations", True),
        _megatron("use_distributed_optimizer", True),
        _megatron("gradient_clipping", 1.0),
        Question("sets_more", "Set recomputation, experts, precision and checkpoints in detail?", Truth(), False,
                 is_saved=False),
        _more("recompute_granularity", "selective"),
        _megatron("recompute_method", "uniform", said(f"{MEGATRON_PREFIX}recompute_granularity", "full")),
        _megatron("recompute_num_layers", 1, said(f"{MEGATRON_PREFIX}recompute_granularity", "full")),
        *(_more(name, kind=Number(least=1)) for name in (
            "decoder_last_pipeline_num_layers", "expert_model_parallel_size", "expert_tensor_parallel_size",
            "context_parallel_size",
        )),
        _more("attention_backend", True),
        _more("attention_dropout"),
        _more("hidden_dropout"),
        *(_more(name, False) for name in (
            "attention_softmax_in_fp32", "use_rotary_position_embeddings", "calculate_per_token_loss", "eod_mask_loss",
            "use_custom_fsdp", "optimizer_cpu_offload",
        )),
        _megatron("overlap_cpu_optimizer_d2h_h2d", False, said(f"{MEGATRON_PREFIX}optimizer_cpu_offload")),
        *(_more(name, False) for name in ("use_precision_aware_optimizer", "no_save_optim", "no_load_optim")),
    ),
    section="megatron_lm_config",
    asked_when=said("way", "MEGATRON_LM"),
)  # fmt: skip

PREFIX = "parallelism_config_"
AXES = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")

with_fsdp2: Condition = every(said("way", "FSDP"), said("fsdp_version", 2))
with_deepspeed: Condition = said("way", "DEEPSPEED")


def processes_left(answers: Answers) -> int:
    """How many processes are left for the mesh dimensions that have no size yet."""
    taken: int = prod(answers.get(f"{PREFIX}{axis}", 1) for axis in AXES)
    return int(answers["num_processes"]) // taken


def fits(value: int, answers: Answers) -> str:
    """Reject a size by which the number of processes that are left is not divisible."""
    left = processes_left(answers)
    return f"{left} processes are left, which is not divisible by {value}." if left % value else ""


def copies_fit(value: int, answers: Answers) -> str:
    """Reject replicas that leave no ranks for sharding under tensor or context parallelism."""
    if reason := fits(value, answers):
        return reason
    shared = any(answers.get(f"{PREFIX}{axis}", 1) > 1 for axis in ("tp_size", "cp_size"))
    if value > 1 and shared and processes_left(answers) == value:
        return "Tensor and context parallelism need a sharded model: leave ranks for sharding."
    return ""


def sharding(answers: Answers) -> dict[str, int]:
    """Assign the processes that are left to `dp_shard`, which has no question."""
    return {f"{PREFIX}dp_shard_size": processes_left(answers)} if answers.get("combines") else {}


def _size(axis: str, wrong: Any = fits, **more: Any) -> Question:
    return about(f"{PREFIX}{axis}_size", 1, wrong=wrong, **more)


def _is_above_one(axis: str) -> Condition:
    return lambda answers: answers.get(f"{PREFIX}{axis}_size", 1) > 1


PARALLELISM = Topic(
    "Combined parallelism",
    (
        Question("combines", "Combine it with tensor or context parallelism?", Truth(), False, with_fsdp2,
                 is_saved=False),
        Question("combines", "Combine it with sequence parallelism?", Truth(), False, with_deepspeed, is_saved=False),
        _size("tp", asked_when=every(with_fsdp2, said("combines"))),
        _size("cp", asked_when=every(with_fsdp2, said("combines"))),
        about(f"{PREFIX}cp_comm_strategy", "allgather", _is_above_one("cp")),
        _size("sp", asked_when=every(with_deepspeed, said("combines"))),
        about(f"{PREFIX}sp_seq_length", None, _is_above_one("sp"), kind=Number(least=1), is_required=False),
        about(f"{PREFIX}sp_seq_length_is_variable", True, _is_above_one("sp")),
        about(f"{PREFIX}sp_attn_implementation", "sdpa", _is_above_one("sp"), kind=Text(without_blanks=True)),
        _size("dp_replicate", copies_fit, asked_when=said("combines")),
    ),
    section="parallelism_config",
    asked_when=lambda answers: (
        (with_fsdp2(answers) or with_deepspeed(answers)) and answers.get("num_processes", 1) > 1
    ),
)  # fmt: skip
