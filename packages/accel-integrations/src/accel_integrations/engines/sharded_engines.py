"""Functions that the engines with sharded parameters share, and a check that all engines but DeepSpeed's share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_state.mesh import ParallelismConfig


def check_no_ulysses(config: ParallelismConfig, engine: str) -> None:
    """Reject the sequence parallelism of DeepSpeed (Ulysses) under another engine.

    Raises:
        ValueError: It is asked for; the message says what to pass instead.
    """
    if config.sp_enabled and config.sp_backend == "deepspeed":
        raise ValueError(
            f"sp_size={config.sp_size} with sp_backend='deepspeed' needs DeepSpeed, but the engine is {engine!r}. Pass "
            "a DeepSpeedPlugin, and no other plugin, or choose sp_backend='torch'."
        )


def check_mesh(engine: Engine) -> None:
    """Check that the mesh has a dimension along which parameters are sharded.

    Raises:
        ValueError: It has none; the message names the sizes.
    """
    config = engine.context.state.parallelism_config
    if config is None:
        return
    check_no_ulysses(config, engine.name)
    if config.total_size > 1 and not config.dp_shard_cp_dim_names:
        sizes = ", ".join(f"{axis}_size={getattr(config, f'{axis}_size')}" for axis in config.active_mesh_dims)
        raise ValueError(
            f"ParallelismConfig({sizes}) leaves no ranks over which the FSDP plugin could shard parameters. Set dp_shard_size to "
            "more than 1, and the other sizes so that the product is the number of processes, or leave the plugin out."
        )


def num_averaged(engine: Engine) -> int:
    """Number of ranks over which an engine with sharded parameters averages gradients."""
    state = engine.context.state
    config = state.parallelism_config
    if config is None or config.total_size == 1:
        return state.num_processes
    return config.total_size // (config.tp_size * config.pp_size)


def warn_no_join(name: str) -> AbstractContextManager[None]:
    """Warn that ranks with sharded parameters cannot run a forward pass without the others."""
    warn_user(
        f"join_uneven_inputs() has no effect with the {name!r} engine: ranks that hold shards of the model need each "
        "other in every forward pass. Give all processes the same number of batches (even_batches=True)."
    )
    return nullcontext()
