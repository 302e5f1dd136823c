"""FSDP 2 on one rank over the same model sharded by hand: what the library adds, as there is nothing to exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tools.bench.gpu_measure import Figure, Scale, by_turns, fresh_accelerator, median_and_spread, ratio
from tools.bench.gpu_models import blocks


def fsdp_figures(scale: Scale) -> Iterator[Figure]:
    """The time of a step; needs the environment of a launched process."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    width = scale.size(2048, 16)
    x = torch.randn(scale.size(512, 4), width, device=scale.device)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = fresh_accelerator(scale, fsdp_plugin=plugin)  # which makes the process group

    def build() -> nn.Module:
        torch.manual_seed(0)
        return blocks(width, scale.size(8, 2), 4).to(scale.device)

    def stepper(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        def step() -> None:
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    raw = shard_by_hand(scale, build())
    sides = {
        "by hand": stepper(raw, torch.optim.AdamW(raw.parameters(), lr=1e-4), torch.Tensor.backward),
        "prepared": stepper(model, optimizer, accelerator.backward),
    }
    times = by_turns(scale, sides, steps=scale.size(10, 1), rounds=scale.size(12, 2))
    (ours, spread), (floor, _) = median_and_spread(times["prepared"]), median_and_spread(times["by hand"])
    what = "step under FSDP 2 on one rank; floor: `fully_shard` by hand"
    result = ratio(times, "prepared", "by hand")
    yield Figure("fsdp2", what, "ms", ours * 1e3, floor * 1e3, result, 1.02, spread=spread * 1e3)


def shard_by_hand(scale: Scale, model: nn.Module) -> nn.Module:
    """Each block and the whole, as the plugin's wrapping has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(scale.device, (1,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
