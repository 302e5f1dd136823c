"""Functions of accelerate 1.15 that return their argument, or what torch said, return it here too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    compile_regions_fsdp2,
    fsdp2_load_full_state_dict,
    load_fsdp_model,
    save_fsdp_model,
)
from tests.support.ranks import ranks


def test_compiled_regions_are_returned() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert compile_regions_fsdp2(model, backend="eager") is model


@ranks(2)
def test_loading_returns_the_model_and_the_names_that_differ(rank: int, world: int, tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    full = {name: torch.full(tensor.shape, 2.0) for name, tensor in model.state_dict().items()}
    assert fsdp2_load_full_state_dict(accelerator, model, full) is model
    assert all(bool((tensor.full_tensor() == 2.0).all()) for tensor in model.state_dict().values())
    save_fsdp_model(plugin, accelerator, model, str(tmp_path))
    incompatible = load_fsdp_model(plugin, accelerator, model, str(tmp_path))
    assert (incompatible.missing_keys, incompatible.unexpected_keys) == ([], [])
