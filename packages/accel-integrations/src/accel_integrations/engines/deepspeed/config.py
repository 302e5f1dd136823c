"""Filling the "auto" values of the DeepSpeed configuration from prepared objects and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_integrations.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_state.settings.deepspeed_auto import AUTO, get_value, leaf_keys
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.engines.engine import EngineContext
    from accel_state.settings.deepspeed import DeepSpeedPlugin

MICRO_BATCH = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
HIDDEN_SIZE_RULES = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Bucket sizes from a model's hidden size, in elements, as in transformers and accelerate 1.15."""
PLAIN_VALUES = {
    "gradient_clipping": 1.0,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,  # this and the next one: DeepSpeed's own defaults
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
    "scheduler.params.warmup_min_lr": 0,
}
HINTS = {
    MICRO_BATCH: "prepare a data loader with a batch size together with the model",
    "train_batch_size": "prepare a data loader with a batch size together with the model",
    "optimizer.": "pass it to DummyOptim",
    "scheduler.params.warmup_max_lr": "pass lr to DummyOptim",
    "scheduler.": "pass it to DummyScheduler",
    "zero_optimization.": "give the model a config with a hidden_size",
}
"""How a user can fill a key, or all keys with this prefix."""


def fill_auto_values(
    plugin: DeepSpeedPlugin,
    context: EngineContext,
    objects: Sequence[Any],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    num_readers: int,
    num_replicas: int,
) -> None:
    """Fill all "auto" values of the plugin's configuration.

    Args:
        plugin: Its `deepspeed_config` is changed.
        context: The settings of the run; its accumulation steps are set to those of the configuration.
        objects: All arguments of `prepare`; the data loaders give the batch size.
        model: The model.
        optimizer: The optimizer, a `DummyOptim`, or None.
        scheduler: As above.
        num_readers: Number of ranks that read different samples.
        num_replicas: Number of different batches per step, over all ranks.

    Raises:
        ValueError: The message names every value that nothing fills, or batch sizes that contradict each other.
    """
    config = plugin.deepspeed_config
    if "train_batch_size" not in config:
        config.setdefault(MICRO_BATCH, AUTO)  # DeepSpeed needs one of them
    steps = _accumulation_steps(config, context)
    batch = _micro_batch(config, plugin, context, objects, num_readers)
    values: dict[str, Any] = {**PLAIN_VALUES, STEPS: steps}
    # the ranks of a TP group read the same samples, but DeepSpeed's batch size counts each rank
    num_counted = num_replicas * int(get_value(config, "tensor_parallel.autotp_size") or 1)
    if batch is not None:
        values |= {MICRO_BATCH: batch, "train_batch_size": batch * steps * num_counted}
    hidden_size = find_hidden_size(model)
    if hidden_size is not None:
        values |= {key: rule(hidden_size) for key, rule in HIDDEN_SIZE_RULES.items()}
    values |= _of_optimizer(optimizer) | _of_scheduler(
        scheduler, 1 if context.split_batches or context.already_sharded else num_replicas
    )
    _check_all_known(config, values)
    plugin.deepspeed_config_process(must_match=False, **values)
    _check_batch_sizes(config, num_counted)


def _accumulation_steps(config: Mapping[str, Any], context: EngineContext) -> int:
    """Gradient accumulation steps: those of the DeepSpeed configuration, else those of the Accelerator."""
    from_accelerator = context.gradient_state.num_steps
    configured = config.get(STEPS, AUTO)
    if configured == AUTO:
        return from_accelerator
    if from_accelerator not in (1, configured):
        warn_user(
            f"gradient_accumulation_steps={from_accelerator} of the Accelerator differs from {configured} in the DeepSpeed "
            "configuration, which takes precedence. Write 'auto' there, or do not pass it to the Accelerator."
        )
    context.gradient_state.plugin_kwargs["num_steps"] = configured
    return int(configured)


def _micro_batch(
    config: Mapping[str, Any],
    plugin: DeepSpeedPlugin,
    context: EngineContext,
    objects: Sequence[Any],
    num_readers: int,
) -> int | None:
    """Micro-batch size (samples per rank); None when no loader gives it."""
    configured = config.get(MICRO_BATCH, AUTO)
    if configured != AUTO:
        return int(configured)
    sizes = [_batch_size(loader, context.split_batches, num_readers) for loader in objects if _is_loader(loader)]
    if not sizes:
        total = [getattr(loader, "total_batch_size", None) for loader in context.prepared.dataloaders]
        sizes = [None if one is None else one // num_readers for one in total]
    batch_sizes = [size for size in sizes if size is not None]
    if len(batch_sizes) < len(sizes):
        raise ValueError(
            f"{MICRO_BATCH}='auto' cannot be filled, because a data loader has no batch size of its own "
            "(batch_size=None). Set it in the DeepSpeed configuration to the number of samples per process and batch."
        )
    if not batch_sizes:
        return None
    return (min if plugin.is_train_batch_min else max)(batch_sizes)


def _is_loader(item: Any) -> bool:
    return isinstance(item, DataLoader) or hasattr(item, "total_batch_size")


def _batch_size(loader: Any, split_batches: bool, num_readers: int) -> int | None:
    if hasattr(loader, "total_batch_size"):  # a prepared one
        return int(loader.total_batch_size) // num_readers
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        return None
    return size // num_readers if split_batches else size


def find_hidden_size(model: nn.Module) -> int | None:
    """The hidden size of a transformer, from its configuration; None when there is none.

    Args:
        model: Any model; those of transformers have a `config` with `hidden_size` or `hidden_sizes`, or a
            `text_config` with one of them.
    """
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        size = getattr(part, "hidden_size", None)
        if isinstance(size, int):
            return size
        sizes = getattr(part, "hidden_sizes", None)
        if sizes:
            return int(max(sizes))
    return None


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    hyperparameters = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    return {f"optimizer.params.{name}": value for name, value in hyperparameters.items()}


def _of_scheduler(scheduler: Any, num_counted: int) -> dict[str, Any]:
    """Parameters of the configuration's scheduler, which steps once where the program has counted so many batches."""
    if not isinstance(scheduler, DummyScheduler):
        return {}
    # DeepSpeed refuses 0, from 0.19.6 on.
    parameters = {"warmup_num_steps": max(1, scheduler.warmup_num_steps), **scheduler.kwargs}
    rate = getattr(scheduler.optimizer, "lr", None) or getattr(scheduler.optimizer, "defaults", {}).get("lr")
    if rate is not None:
        parameters["warmup_max_lr"] = rate
    total = scheduler.total_num_steps
    if total is not None:
        parameters["total_num_steps"] = math.ceil(total / num_counted)
    return {f"scheduler.params.{name}": value for name, value in parameters.items()}


def _check_all_known(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    missing = [key for key in leaf_keys(config) if get_value(config, key) == AUTO and key not in values]
    if not missing:
        return
    lines = []
    for key in missing:
        hint = next((hint for start, hint in HINTS.items() if key.startswith(start)), None)
        lines.append(f"- {key}: " + (f"{hint}, or write" if hint else "write") + " a value into the configuration")
    raise ValueError(
        "'auto' values of the DeepSpeed configuration cannot be filled, because nothing determines them:\n"
        + "\n".join(lines)
    )


def _check_batch_sizes(config: Mapping[str, Any], num_counted: int) -> None:
    total, micro, steps = (config.get(key, AUTO) for key in ("train_batch_size", MICRO_BATCH, STEPS))
    if AUTO in (total, micro, steps) or total == micro * steps * num_counted:
        return
    raise ValueError(
        f"The DeepSpeed configuration has train_batch_size={total}, which is not {MICRO_BATCH}={micro} x "
        f"{STEPS}={steps} x {num_counted} processes = {micro * steps * num_counted}. Write 'auto' for one of them."
    )
