"""What engines with sharded parameters have in common, and what all engines but DeepSpeed's refuse."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_state.mesh import ParallelismConfig


def refuse_ulysses(config: ParallelismConfig, engine: str) -> None:
    """Refuse the sequence parallelism that is DeepSpeed's own.

    Raises:
        ValueError: Saying what to pass instead.
    """
    if config.sp_enabled and config.sp_backend == "deepspeed":
        raise ValueError(
            f"sp_size={config.sp_size} with sp_backend='deepspeed' needs DeepSpeed, but the engine is {engine!r}: pass a "
            "DeepSpeedPlugin, and no other plugin, or choose sp_backend='torch'."
        )


def check_mesh(engine: Engine) -> None:
    """Refuse a mesh that does not go with sharded parameters.

    Raises:
        ValueError: Naming the sizes.
    """
    config = engine.context.state.parallelism_config
    if config is None:
        return
    refuse_ulysses(config, engine.name)
    if config.dp_replicate_enabled and not config.dp_shard_cp_dim_names:
        raise ValueError(
            f"dp_replicate_size={config.dp_replicate_size} with dp_shard_size=1 gives every process a whole copy of "
            "the model, but an FSDP plugin asks for sharded ones: raise dp_shard_size, or leave the plugin out."
        )


def num_averaged(engine: Engine) -> int:
    """Over how many processes an engine with sharded parameters averages gradients."""
    state = engine.context.state
    config = state.parallelism_config
    if config is None or config.total_size == 1:
        return state.num_processes
    return config.total_size // (config.tp_size * config.pp_size)


def refuse_join(name: str) -> AbstractContextManager[None]:
    """Warn that processes with sharded parameters cannot go on without one another."""
    warn_user(
        f"join_uneven_inputs() has no effect with the {name!r} engine: processes that hold parts of the model need each "
        "other in every forward. Give all of them equally many batches (even_batches=True)."
    )
    return nullcontext()
