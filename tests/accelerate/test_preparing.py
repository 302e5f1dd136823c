"""What `prepare` does with each kind of object, in which order, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_data.loader_shard import DataLoaderShard
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.libraries import is_bitsandbytes_multi_backend_available
from accelerate import Accelerator
from tests.support.ranks import ranks


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader[Any]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(torch.ones(8, 2), batch_size=2)


def test_every_kind_comes_back_prepared_in_the_order_given() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make()
    got = accelerator.prepare(scheduler, loader, optimizer, model)
    assert [type(item) for item in got] == [AcceleratedScheduler, DataLoaderShard, AcceleratedOptimizer, nn.Linear]
    assert got[3] is model
    assert got[2].optimizer is optimizer
    assert got[0].scheduler is scheduler
    assert got[0].optimizers == [got[2]]  # although the scheduler came first


def test_one_object_comes_back_alone() -> None:
    model, *_ = make()
    assert Accelerator(cpu=True).prepare(model) is model


def test_other_objects_pass_through() -> None:
    things = ({"a": 1}, 3, "x", None, torch.ones(2), True)
    assert all(got is thing for got, thing in zip(Accelerator(cpu=True).prepare(*things), things, strict=True))


def test_nothing_to_prepare_is_nothing() -> None:
    assert Accelerator(cpu=True).prepare() == ()


@pytest.mark.parametrize("raw", [False, True])
def test_preparing_again_wraps_nothing_twice(raw: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make()
    first = accelerator.prepare(model, optimizer, scheduler, loader)
    again = (model, optimizer, scheduler, first[3]) if raw else first
    second = accelerator.prepare(*again)
    assert all(a is b for a, b in zip(first, second, strict=True))
    for record in (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders):
        assert len(record) == 1


def test_what_was_forgotten_can_be_prepared_again() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    first = accelerator.prepare(*make())
    forward = first[0].forward
    accelerator.free_memory()
    second = accelerator.prepare(*first)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert second[0].forward is forward
    for record in (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders):
        assert len(record) == 1


def test_prepared_objects_are_marked() -> None:
    got = Accelerator(cpu=True).prepare(*make())
    assert all(item._is_accelerate_prepared for item in got)


def test_each_kind_has_a_method_of_its_own() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make()
    assert accelerator.prepare_model(model) is model
    assert isinstance(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert isinstance(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)
    assert isinstance(accelerator.prepare_data_loader(loader), DataLoaderShard)


@pytest.mark.parametrize(
    ("method", "wanted"), [("prepare_model", "Module"), ("prepare_optimizer", "Optimizer"), ("prepare_data_loader", "DataLoader")]
)  # fmt: skip
def test_the_wrong_kind_is_named(method: str, wanted: str) -> None:
    with pytest.raises(TypeError, match=rf"{method}\(\) got 3 of type int. Pass an object of {wanted}"):
        getattr(Accelerator(cpu=True), method)(3)


def test_device_placement_has_an_entry_for_each_object() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make()
    with pytest.raises(ValueError, match=r"device_placement=\[True\] has 1 entries for 2 objects"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert accelerator._models == []
    prepared = accelerator.prepare(loader, model, device_placement=[False, None])
    assert prepared[0].device is None
    assert prepared[1] is model


def test_a_model_stays_where_it_is_without_device_placement() -> None:
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    Accelerator(cpu=True, device_placement=False).prepare(model)
    assert model.weight.is_meta


# ---- models spread over devices -----------------------------------------------------------------------------------------


def dispatched() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    return model


def test_a_spread_model_trains_in_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    model = dispatched()
    assert accelerator.verify_device_map(model)
    assert accelerator.verify_device_map(nn.Sequential(model))
    assert accelerator.prepare(model) is model
    plain = nn.Linear(1, 1)
    plain.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert not accelerator.verify_device_map(plain)


@pytest.mark.skipif(is_bitsandbytes_multi_backend_available(), reason="layers of bitsandbytes compute on CPUs here")
def test_quantized_layers_off_the_device_are_not_trained() -> None:
    model = nn.Linear(2, 2)
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match="Linear was loaded in 8 bits with modules offloaded to cpu.* CPU or disk offload"
    ):
        Accelerator(cpu=True).prepare(model)


@ranks(2)
def test_a_spread_model_is_refused_on_several_processes(rank: int, world: int) -> None:
    accelerator = Accelerator()
    for prepare in (accelerator.prepare, accelerator.prepare_model):
        with pytest.raises(ValueError, match=r"Sequential .*device_map.*2 processes"):
            prepare(dispatched())
    assert accelerator._models == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true")
        assert isinstance(accelerator.prepare(dispatched()), DistributedDataParallel)


# ---- several processes --------------------------------------------------------------------------------------------------


@ranks(2)
def test_several_processes_train_one_model(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model, optimizer, scheduler, loader = make()
    wrapped, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert isinstance(wrapped, DistributedDataParallel)
    assert accelerator.unwrap_model(wrapped) is model
    assert accelerator.prepare(wrapped) is wrapped
    assert accelerator.prepare(model) is wrapped  # the same model is not wrapped a second time
    assert len(loader) == 2
    assert set(accelerator.get_state_dict(wrapped)) == {"weight", "bias"}
    assert set(accelerator.get_state_dict(wrapped, unwrap=False)) == {"module.weight", "module.bias"}


@ranks(2)
def test_evaluation_needs_no_exchange_of_gradients(rank: int, world: int) -> None:
    model = nn.Linear(1, 1)
    assert Accelerator().prepare_model(model, evaluation_mode=True) is model


# ---- afterwards ---------------------------------------------------------------------------------------------------------


def test_free_memory_forgets_and_returns_nones() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, *_ = accelerator.prepare(*make())
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator.step == 0
    assert accelerator.clear() == []


def test_skip_first_batches_goes_on_in_the_middle() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(6), batch_size=2))
    rest = accelerator.skip_first_batches(loader, num_batches=2)
    assert [batch.tolist() for batch in rest] == [[4, 5]]


def test_compiled_models_unwrap() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = nn.Linear(2, 1)
    prepared = accelerator.prepare(model)
    assert type(prepared).__name__ == "OptimizedModule"
    assert accelerator.unwrap_model(prepared) is prepared
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert accelerator.prepare(prepared) is prepared


def test_mixed_precision_wraps_the_forward_and_unwrapping_restores_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).dtype is torch.float32
    with accelerator.autocast():
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.bfloat16
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(plain)


def test_autocast_does_nothing_in_full_precision() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

    @accelerator.autocast()
    def as_a_decorator() -> int:
        return 3

    assert as_a_decorator() == 3
