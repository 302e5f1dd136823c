"""The rows of the table: every engine and kind of parallelism, with the batches and the step that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import (
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from tests.support.tiny_transformer import LENGTH, TP_PLAN, VOCABULARY, make_model, shift, token_loss

WIDTH, HEADS, BATCH = 64, 8, 4


def build() -> nn.Module:
    """A transformer of 300,000 parameters: its tensors are large beside the 512 bytes that the allocator rounds to."""
    return make_model(width=WIDTH, heads=HEADS, layers=6)


def plain_loss(accelerator: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return token_loss(model(batch["input_ids"]), shift(batch["labels"]))


def loss_of_shards(accelerator: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The batch holds parts of sequences already."""
    loss = token_loss(model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])
    return accelerator.mean_over_tokens(loss, (batch["shift_labels"] != -100).sum())


@dataclass(frozen=True)
class Row:
    """One engine or combination.

    Args:
        settings: Makes the arguments of `Accelerator`, for a number of processes.
        worlds: Numbers of processes.
        loss: The loss of a batch.
        shards: Into how many parts each sequence of a batch is split.
        in_context: Whether a step runs in `maybe_context_parallel`.
        skipped: Columns that the pretended groups cannot carry.
        own_share: What a rank keeps of the model at most, in multiples of it; by the number of processes.
        is_launched: Whether the environment is that of a launch, also for one process.
    """

    settings: Callable[[int], dict[str, Any]]
    worlds: tuple[int, ...] = (8,)
    loss: Callable[..., torch.Tensor] = plain_loss
    shards: Callable[[int], int] = lambda world: 1
    in_context: bool = False
    skipped: tuple[str, ...] = ()
    own_share: Callable[[int], float] = lambda world: 1.0
    is_launched: bool = True

    def batch(self, world: int, device: torch.device) -> dict[str, torch.Tensor]:
        """A batch on the device, as the prepared loader of this row would make it; no host waits for it."""
        length = LENGTH // self.shards(world)
        tokens = torch.arange(BATCH * length, device=device).view(BATCH, length) % VOCABULARY
        positions = torch.arange(length, device=device).expand(BATCH, length).clone()
        return {"input_ids": tokens, "labels": tokens, "shift_labels": tokens, "position_ids": positions}

    @contextmanager
    def around_step(self, accelerator: Any, batch: dict[str, torch.Tensor]) -> Iterator[None]:
        if not self.in_context:
            yield
            return
        buffers = [batch["input_ids"], batch["shift_labels"], batch["position_ids"]]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
            yield


def fsdp(version: int, **options: Any) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version, **options)}


by_blocks = partial(fsdp, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"])


def mesh(**sizes: Any) -> dict[str, Any]:
    handlers = {}
    if "tp_size" in sizes:
        handlers["tp_handler"] = TorchTensorParallelConfig(plan=TP_PLAN)
    return {"parallelism_config": ParallelismConfig(**sizes, **handlers)}


def pipeline(world: int, schedule: str = "gpipe", **sizes: int) -> dict[str, Any]:
    stages = 2
    handler = PipelineParallelConfig(schedule)  # type: ignore[arg-type]
    return {
        "parallelism_config": ParallelismConfig(
            pp_size=stages, pp_handler=handler, dp_replicate_size=world // stages, **sizes
        )
    }


def sequence(world: int, size: int = 2) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(sp_size=size, sp_backend="torch", dp_replicate_size=world // size)}


def context(world: int, size: int = 2) -> dict[str, Any]:
    handler = TorchContextParallelConfig(cp_comm_strategy="allgather")
    config = ParallelismConfig(cp_size=size, cp_handler=handler, dp_shard_size=world // size)
    return {"parallelism_config": config, "mixed_precision": "bf16", **by_blocks(2)}


FROM_OTHERS = (
    "warm_up",
    "step",
    "evaluate",
    "save_state",
    "load_state",
    "gather_scalar",
    "reduce_scalar",
    "broadcast",
)
"""What pipelines do with objects and activations that other ranks must have made."""
OTHERS_SHARDS = ("load_state",)
"""Shards of other ranks are not there, and the library says so."""


def sharded(world: int) -> float:
    return 1 / world


ROWS: dict[str, Row] = {
    "single": Row(lambda world: {}, (1,), is_launched=False),
    "single-bf16": Row(lambda world: {"mixed_precision": "bf16"}, (1,), is_launched=False),
    "ddp": Row(lambda world: {}, (1, 2, 8, 64)),
    "one-rank-bf16": Row(lambda world: {"mixed_precision": "bf16"}, (1,)),
    "ddp-fp16": Row(lambda world: {"mixed_precision": "fp16"}),
    "fsdp1": Row(lambda world: by_blocks(1), skipped=OTHERS_SHARDS, own_share=sharded),
    "fsdp1-offload": Row(lambda world: by_blocks(1, cpu_offload=True), skipped=OTHERS_SHARDS, own_share=lambda world: 0.0),
    "fsdp1-full-states": Row(lambda world: by_blocks(1, state_dict_type="full_state_dict"), own_share=sharded),
    "fsdp2": Row(lambda world: by_blocks(2), (1, 2, 8, 64), skipped=OTHERS_SHARDS, own_share=sharded),
    "fsdp2-bf16": Row(
        lambda world: by_blocks(2) | {"mixed_precision": "bf16"}, skipped=OTHERS_SHARDS, own_share=sharded
    ),
    "fsdp2-offload": Row(lambda world: by_blocks(2, cpu_offload=True), skipped=OTHERS_SHARDS, own_share=lambda world: 0.0),
    "fsdp2-full-states": Row(lambda world: by_blocks(2, state_dict_type="full_state_dict"), own_share=sharded),
    "fsdp2-offload-full-states": Row(
        lambda world: by_blocks(2, cpu_offload=True, state_dict_type="full_state_dict"), own_share=lambda world: 0.0
    ),
    "hsdp": Row(
        lambda world: by_blocks(2) | mesh(dp_replicate_size=2, dp_shard_size=world // 2),
        skipped=OTHERS_SHARDS, own_share=lambda world: 2 / world,
    ),
    "tp": Row(lambda world: mesh(tp_size=world), (2, 8), own_share=sharded),
    "ddp+tp": Row(
        lambda world: mesh(tp_size=4, dp_replicate_size=world // 4), own_share=lambda world: 1 / 4
    ),
    "fsdp2+tp": Row(
        lambda world: by_blocks(2) | mesh(tp_size=2, dp_shard_size=world // 2),
        skipped=OTHERS_SHARDS, own_share=sharded,
    ),
    "hsdp+tp": Row(
        lambda world: by_blocks(2) | mesh(tp_size=2, dp_replicate_size=2, dp_shard_size=world // 4), (64,),
        skipped=OTHERS_SHARDS, own_share=lambda world: 2 / world,
    ),
    "sp+ddp": Row(sequence, (2, 8), loss_of_shards, shards=lambda world: 2),
    "cp+fsdp2": Row(
        context, (2, 8), loss_of_shards, in_context=True, skipped=OTHERS_SHARDS, own_share=lambda world: 1 / world
    ),
    "pp": Row(pipeline, (2,), skipped=FROM_OTHERS, own_share=lambda world: 0.6),
    "pp-1f1b": Row(partial(pipeline, schedule="1f1b"), (2,), skipped=FROM_OTHERS, own_share=lambda world: 0.6),
    "pp+ddp": Row(pipeline, (8,), skipped=FROM_OTHERS, own_share=lambda world: 0.6),
}  # fmt: skip
