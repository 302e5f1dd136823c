"""Full states of sharded models are gathered one tensor at a time, and only ranks that write them keep any."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_integrations.parallel import full_state
from accel_integrations.parallel.pipeline import layout
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import TorchTensorParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_loader, make_model, shift, token_loss

CONFIGS: dict[str, Any] = {
    "tp": lambda: {
        "parallelism_config": ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=TP_PLAN))  # type: ignore[arg-type]
    },
    "pp": lambda: {"parallelism_config": ParallelismConfig(pp_size=2)},
    "pp with dp_shard": lambda: {
        "parallelism_config": ParallelismConfig(pp_size=2, dp_shard_size=2),
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
    },
}


class Watch:
    """Notes the order of unsharding and sending, and which of these tensors are still alive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.order = ""
        for module in (full_state, layout):
            patch.setattr(module, "full_tensor", self.counting(module.full_tensor))
        broadcast = PipelineGroup.broadcast

        def watched(group: PipelineGroup, tensor: torch.Tensor, source: int) -> None:
            self.note("s", tensor)
            broadcast(group, tensor, source)

        patch.setattr(PipelineGroup, "broadcast", watched)

    def counting(self, function: Any) -> Any:
        def counted(tensor: Any) -> Any:
            full = function(tensor)
            if full is not tensor:
                self.note("u", full)
            return full

        return counted

    def note(self, event: str, tensor: torch.Tensor) -> None:
        self.order += event
        self.made.append(weakref.ref(tensor))

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.made)


def trained(kind: str) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **CONFIGS[kind]())
    model = make_model(layers=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), make_loader(8)
    )
    batch = next(iter(loader))
    accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
    optimizer.step()
    return accelerator, model, optimizer


def check_who_keeps(kind: str, rank: int, tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(kind)
    expected = accelerator.get_state_dict(model)
    assert expected.keys() == make_model(layers=2).state_dict().keys(), "on every rank"
    assert accelerator.engine.full_optimizer_state(optimizer)["state"]
    seen: list[set[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)

        def look(models: Any, weights: Any, folder: str) -> None:
            seen.extend(map(set, weights))
            # the states of all models and optimizers are collected; each of gloo's two threads may still have its last tensor
            assert rank == 0 or (len(watch.made) > 20 and watch.num_alive <= 2)

        hook = accelerator.register_save_state_pre_hook(look)
        folder = Path(os.fspath(accelerator.save_state(tmp_path / "state")))
        accelerator.save_model(model, tmp_path / "model")
        assert kind == "tp" or "uu" not in watch.order, "each is sent before the next one is unsharded"
    hook.remove()
    assert seen == [set(expected) if rank == 0 else set()]
    for name in ("state", "model"):
        stored = load_file(folder.parent / name / "model.safetensors")
        assert stored.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(stored[key], value, rtol=0, atol=0)
    before = {key: value.clone() for key, value in expected.items()}
    accelerator.load_state(str(tmp_path / "state"))
    for key, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.takes_turns
@ranks(2)
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_only_the_writer_keeps_full_states(rank: int, world: int, kind: str, tmp_path: Path) -> None:
    check_who_keeps(kind, rank, tmp_path)


@pytest.mark.takes_turns
@ranks(4)
def test_sharded_stages_are_unsharded_one_tensor_at_a_time(rank: int, world: int, tmp_path: Path) -> None:
    check_who_keeps("pp with dp_shard", rank, tmp_path)


def test_gathered_tensors_are_kept_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock: the all-gather of a GPU's mesh."""
    with FakeTensorMode():
        shard, full = torch.empty(2, device="cuda"), torch.empty(4, device="cuda")
        monkeypatch.setattr(full_state, "to_local", torch.Tensor.detach)
        monkeypatch.setattr(full_state, "full_tensor", lambda tensor: full)
        assert full_state.gathered(shard, keep=True).device.type == "cpu"
        assert full_state.gathered(shard, keep=False) is None
        state = full_state.unshard_state_dict({"one": shard, "tied": shard})
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert state["one"] is state["tied"]
