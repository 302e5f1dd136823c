"""What engines ask of torch on GPUs, read off without one: the device of the state is a name here."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from accel_integrations.engines import ddp, fsdp2
from accel_integrations.engines.ddp import DDPEngine
from accel_integrations.engines.deepspeed.engine import DeepSpeedEngine
from accel_integrations.engines.fsdp1 import FlatParameters, FSDP1Engine
from accel_integrations.precision.precision import Precision
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.block = nn.Linear(2, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def engine_of(kind: Any, device: str, plugin: Any = None) -> Any:
    state = SimpleNamespace(
        device=torch.device(device), parallelism_config=None, fsdp_plugin=plugin, mixed_precision="no"
    )
    engine = object.__new__(kind)
    engine._flat = FlatParameters()
    engine.context = SimpleNamespace(state=state, handlers=SimpleNamespace(ddp=None))
    return engine


def to_cpu(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


@pytest.mark.parametrize("order", [1, -1])
def test_fsdp1_keeps_tied_weights_tied_where_only_the_first_rank_has_values(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    monkeypatch.setattr(FSDP1Engine, "_mesh", lambda self, is_hybrid: None)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, param_init_fn=to_cpu)
    with torch.device("meta"):
        model = Tied()
    options = engine_of(FSDP1Engine, "cuda", plugin)._options(model, [])
    for module in list(model.modules())[::order]:
        options["param_init_fn"](module)
    assert model.head.weight is model.embedding.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert len(list(model.parameters())) == 3, "as many as on the first rank"


def test_fsdp1_moves_ignored_modules_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Wrapper(nn.Module):
        """Torch's, as far as it needs no processes."""

        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__()
            asked.update(options)
            self._handle = None

    monkeypatch.setattr(FSDP1Engine, "_mesh", lambda self, is_hybrid: None)
    monkeypatch.setattr(FSDP1Engine, "_sync_module_states", lambda *_: None)
    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Wrapper)
    model = Tied()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, ignored_modules="bl.*", use_orig_params=True)
    engine_of(FSDP1Engine, "meta", plugin).prepare_model(model)  # the only other device that is here
    assert asked["ignored_modules"] == [model.block]
    assert model.block.weight.is_meta
    assert not model.embedding.weight.is_meta


def test_an_iterator_of_ignored_modules_serves_every_model() -> None:
    model = Tied()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, ignored_modules=iter([model.block]))
    assert plugin.ignored_modules == [model.block]


@ranks(2)
def test_fsdp1_shards_no_ignored_modules(rank: int, world: int) -> None:
    from accelerate import Accelerator

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, ignored_modules="head")
    model = make_model()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    prepared = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model)
    actual = {name.replace("_fsdp_wrapped_module.", ""): one.numel() for name, one in prepared.named_parameters()}
    kept = {name for name, size in actual.items() if size == sizes[name]}
    assert {name for name in sizes if name.startswith("head")} <= kept
    assert sum(actual.values()) < sum(sizes.values()), "the others are sharded"


@pytest.mark.parametrize(("elsewhere", "expected"), [("cpu", ([0], 0)), ("meta", (None, None))])
def test_replicas_of_a_model_on_several_devices_have_no_device_ids(
    monkeypatch: pytest.MonkeyPatch, elsewhere: str, expected: tuple[Any, Any]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ddp, "Replica", lambda model, **options: asked.update(options))
    monkeypatch.setattr(DDPEngine, "averaging_group", None)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).to(elsewhere))
    engine_of(DDPEngine, "cuda:0").prepare_model(model, device_placement=False)
    assert (asked["device_ids"], asked["output_device"]) == expected


def test_fsdp2_moves_a_block_before_it_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, instead of tensor by tensor to the device and back, and then again by torch."""
    seen: list[list[str]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def look(module: nn.Module, *_: Any) -> None:
        seen.append([parameter.device.type for parameter in model.parameters()])

    monkeypatch.setattr(fsdp2, "sync_module_states", look)
    monkeypatch.setattr(fsdp2, "check_module_states", lambda *_: None)
    monkeypatch.setattr(fsdp2.Sharding, "_groups", [])
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda *_, **__: None)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False
    )
    fsdp2.Sharding(plugin, None, torch.device("meta")).shard(model)  # type: ignore[arg-type]
    assert seen[0].count("meta") == 2, "block by block"
    assert seen[-1] == ["meta"] * 4


def test_deepspeed_takes_the_device_that_the_launcher_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of DeepSpeed, which takes the GPU whose index is the local rank."""
    indices: list[str] = []

    def initialize(**arguments: Any) -> None:
        indices.append(os.environ["LOCAL_RANK"])
        raise InterruptedError

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(DeepSpeedEngine, "plugin", MagicMock(deepspeed_config={}))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for device in ("cuda:0", "cuda:3", "cpu"):
        engine = engine_of(DeepSpeedEngine, device)
        engine.precision = Precision()
        with pytest.raises(InterruptedError):
            engine._build(nn.Linear(1, 1), None, None)
        assert os.environ["LOCAL_RANK"] == "3"
    assert indices == ["0", "3", "3"]
