"""Options of combined parallelism."""

from __future__ import annotations

from typing import Any

from accel_cli.arguments import Option, truth
from accel_cli.launch.flags.group import OptionGroup

TITLE = "ParallelismConfig Arguments"


def _row(name: str, help: str, **rest: Any) -> Option:
    flag = f"--parallelism_config_{name}"
    return Option(flag, help, environment=f"PARALLELISM_CONFIG_{name.upper()}", **rest)


_size: dict[str, Any] = {"type": int, "default": 1, "metavar": "N"}

PARALLELISM = OptionGroup(
    TITLE,
    (
        _row("dp_replicate_size", "Copies of the model.", **_size),
        _row("dp_shard_size", "Processes that shard one copy.", **_size),
        _row("tp_size", "Processes that share one layer.", **_size),
        _row("cp_size", "Processes that share one sequence, inside the attention.", **_size),
        _row("cp_backend", "Who does that.", default="torch", choices=("torch",)),
        _row("sp_size", "Processes that share one sequence, outside the attention.", **_size),
        _row("sp_backend", "Who does that.", default="deepspeed", choices=("deepspeed", "torch")),
        _row("pp_size", "Processes that hold consecutive parts of the model; 1 by default.", type=int, metavar="N"),
    ),
    shown_with="--use_parallelism_config",
    handed_when=lambda settings: settings.use_parallelism_config,
    announced_by="ACCELERATE_USE_PARALLELISM_CONFIG",
)

CONTEXT = OptionGroup(
    TITLE,
    (
        _row("cp_comm_strategy", "How context-parallel processes exchange keys: allgather or alltoall.",
             default="allgather", metavar="STRATEGY"),
    ),
    shown_with="--use_parallelism_config",
    handed_when=lambda settings: settings.use_parallelism_config and settings.parallelism_config_cp_size > 1,
    counts_with="--use_parallelism_config and --parallelism_config_cp_size",
)  # fmt: skip

SEQUENCE = OptionGroup(
    TITLE,
    (
        _row("sp_seq_length", "Length of the sequences.", metavar="N"),
        _row("sp_seq_length_is_variable", "Whether it changes: true or false.", default=True, type=truth,
             metavar="BOOL"),
        _row("sp_attn_implementation", "Attention implementation.", default="sdpa", metavar="NAME"),
    ),
    shown_with="--use_parallelism_config",
    handed_when=lambda settings: settings.use_parallelism_config and settings.parallelism_config_sp_size > 1,
    counts_with="--use_parallelism_config and --parallelism_config_sp_size",
)  # fmt: skip

PIPELINE = OptionGroup(
    TITLE,
    (
        _row("pp_schedule", "In which order its microbatches run.", metavar="NAME",
             choices=("gpipe", "1f1b", "interleaved1f1b")),
        _row("pp_num_microbatches", "Into how many parts a batch is cut.", type=int, metavar="N"),
        _row("pp_split_points", "Modules at which stages begin, with commas between them, or auto.",
             metavar="NAMES"),
    ),
    shown_with="--use_parallelism_config",
    handed_when=lambda settings: settings.use_parallelism_config and (settings.parallelism_config_pp_size or 1) > 1,
    counts_with="--use_parallelism_config and --parallelism_config_pp_size",
)  # fmt: skip
