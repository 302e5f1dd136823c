"""What is read of a checkpoint waits in CPU memory: the device holds no second copy of model and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_integrations.parallel.full_state import distribute_like
from accel_integrations.training_state.loading import read_states
from accel_integrations.training_state.reader import FileState, LocalState
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The only device without values that is here: what were allocated on it would have none."""
    return tensor.to("meta")


@ranks(2)
def test_shards_are_read_into_cpu_memory(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(15.0).view(5, 3)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        expected = distribute_tensor(full, mesh, placements, src_data_rank=None)
        like = on_meta(expected)
        assert isinstance(like, DTensor)
        shard = distribute_like(full, like)
        assert shard.device.type == "cpu"
        torch.testing.assert_close(shard.to_local(), expected.to_local(), rtol=0, atol=0)
        assert shard.to_local().untyped_storage().nbytes() == shard.to_local().nbytes

        torch.save({"full": full}, tmp_path / f"full{rank}.bin")
        filled = FileState(tmp_path / f"full{rank}.bin").fill(("full",), like)
        torch.testing.assert_close(filled.to_local(), expected.to_local(), rtol=0, atol=0)  # type: ignore[attr-defined]

        local = {"parts": {"w": expected.to_local()}, "shapes": [(("w",), (5, 3))], "num_processes": world}
        torch.save(local, tmp_path / f"local{rank}.bin")
        filled = LocalState(tmp_path / f"local{rank}.bin").fill(("w",), like)
        torch.testing.assert_close(filled.to_local(), expected.to_local(), rtol=0, atol=0)  # type: ignore[attr-defined]


class NotesMemory(torch.optim.AdamW):
    """Notes whether its old state is still there when a new one comes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = len(self.state)
        super().load_state_dict(state_dict)


def one_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_old_states_make_room_once_all_is_verified(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer: Any = NotesMemory(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    one_step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(str(tmp_path / "state")))
    expected = [one.detach().clone() for one in model.parameters()]
    moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    one_step(accelerator, model, optimizer)

    waiting = read_states(folder, [model], [optimizer])
    assert len(optimizer.state) == 4, "nothing is applied yet"
    changed = [one.detach().clone() for one in model.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(changed, expected, strict=True))
    waiting.apply()
    assert waiting.models == waiting.optimizers == []
    assert optimizer.optimizer.held == 0
    for actual, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(actual.detach(), wanted)
    for entry, wanted in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(entry["exp_avg"], wanted)


@ranks(2)
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_version_1_loads_from_cpu_memory_too(rank: int, world: int, state_dict_type: str, tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, state_dict_type=state_dict_type)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(net := nn.Linear(4, 2), torch.optim.AdamW(net.parameters(), lr=0.1))
    one_step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(str(tmp_path / "state")))
    expected = accelerator.get_state_dict(model)
    one_step(accelerator, model, optimizer)
    accelerator.load_state(str(folder))
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, expected[name])
