"""The rows of the grid: names, ranks, and the flags of `accelerate launch`."""

from __future__ import annotations

from dataclasses import dataclass

from accel_cli.errors import UsageError, did_you_mean

REFERENCE = "one process"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the grid.

    Attributes:
        name: As `--only` takes it.
        ranks: How many processes are launched.
        flags: For `accelerate launch`, separated by blanks; `{num_steps}` and `{max_norm}` are what one process used.
        library: What must be installed for it; empty for nothing.
        needs_blocks: Whether the script must shard its buffers in `maybe_context_parallel`.
    """

    name: str
    ranks: int
    flags: str = ""
    library: str = ""
    needs_blocks: bool = False


# Small units, so that even a small model is sharded in several.
FSDP = "--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1000 --fsdp_version"
# DeepSpeed clips and counts micro-batches itself.
ZERO = (
    "--use_deepspeed --gradient_accumulation_steps {num_steps} --gradient_clipping {max_norm} --zero3_init_flag false "
    "--zero_stage"
)


def _mesh(**sizes: int) -> str:
    return " ".join(["--use_parallelism_config", *(f"--parallelism_config_{k}_size {n}" for k, n in sizes.items())])


def _data_parallel(name: str, flags: str, *ranks: int, library: str = "") -> tuple[Configuration, ...]:
    return tuple(Configuration(f"{name}-{count}", count, flags, library) for count in ranks)


CONFIGURATIONS = (
    *_data_parallel("ddp", "", 2, 3, 4),
    *_data_parallel("fsdp1", f"{FSDP} 1", 2, 3),
    *_data_parallel("fsdp2", f"{FSDP} 2", 1, 2, 3, 4),
    *_data_parallel("zero1", f"{ZERO} 1", 2, library="deepspeed"),
    *_data_parallel("zero2", f"{ZERO} 2", 2, 3, library="deepspeed"),
    *_data_parallel("zero3", f"{ZERO} 3", 2, 3, library="deepspeed"),
    Configuration("tp-2", 2, _mesh(tp=2)),
    Configuration("tp-4", 4, _mesh(tp=4)),
    Configuration("cp-2", 2, _mesh(cp=2), needs_blocks=True),
    Configuration("sp-2", 2, f"{_mesh(sp=2)} --parallelism_config_sp_backend torch"),
    Configuration("sp-4", 4, f"{_mesh(sp=4)} --parallelism_config_sp_backend torch"),
    Configuration("pp-2", 2, _mesh(pp=2)),
    Configuration("pp-4", 4, _mesh(pp=4)),
    Configuration("hsdp-4", 4, f"{_mesh(dp_replicate=2, dp_shard=2)} {FSDP} 2"),
    Configuration("fsdp2-tp-4", 4, f"{_mesh(dp_shard=2, tp=2)} {FSDP} 2"),
    Configuration("fsdp2-cp-4", 4, f"{_mesh(dp_shard=2, cp=2)} {FSDP} 2", needs_blocks=True),
    Configuration("ddp-pp-4", 4, _mesh(dp_replicate=2, pp=2)),
)  # fmt: skip


def chosen(names: str | None) -> tuple[Configuration, ...]:
    """The rows that `--only` names.

    Args:
        names: Separated by commas; None for all rows.

    Raises:
        UsageError: There is no row of a name.
    """
    if names is None:
        return CONFIGURATIONS
    rows = {row.name: row for row in CONFIGURATIONS}
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed or [names]:
        if name not in rows:
            raise UsageError(
                f"--only {names}: there is no configuration {name!r}.{did_you_mean(name, list(rows))} Choose from {', '.join(rows)}."
            )
    return tuple(rows[name] for name in dict.fromkeys(listed))
