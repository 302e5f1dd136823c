"""Parameters divided by `fully_shard`: what is divided, in which formats, and what optimizers see of it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_loader, make_model, reference_curve, shift, token_loss

WRAP = "transformer_based_wrap"
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def accelerator_with(precision: str = "no", accumulate: int = 1, config: Any = None, **options: Any) -> Accelerator:
    options = {"auto_wrap_policy": WRAP, **options}
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **options),
        parallelism_config=config,
    )


def one_batch() -> Any:
    return next(iter(make_loader(8)))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return token_loss(model(batch["input_ids"]), shift(batch["labels"]))


def my_rows(batch: Any, rank: int, world: int) -> Any:
    return {key: value.chunk(world)[rank] for key, value in batch.items()}


def sharded_modules(model: nn.Module) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@ranks(2)
def test_blocks_named_by_class_by_size_or_not_at_all(rank: int, world: int) -> None:
    accelerator = accelerator_with()
    assert sharded_modules(accelerator.prepare_model(make_model())) == ["", "blocks.0", "blocks.1"]
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["MLP"]
    assert sharded_modules(accelerator.prepare_model(make_model())) == ["", "blocks.0.mlp", "blocks.1.mlp"]
    accelerator.state.fsdp_plugin.auto_wrap_policy = None
    assert sharded_modules(accelerator.prepare_model(make_model())) == [""]


@ranks(2)
def test_blocks_by_size(rank: int, world: int) -> None:
    accelerator = accelerator_with(auto_wrap_policy="size_based_wrap", min_num_params=2000)
    assert sharded_modules(accelerator.prepare_model(make_model())) == ["", "blocks.0.mlp", "blocks.1.mlp"]


@ranks(2)
def test_an_unknown_class_is_refused_with_those_that_are_near(rank: int, world: int) -> None:
    accelerator = accelerator_with(transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(ValueError, match="'Blok'.*Block"):
        accelerator.prepare_model(make_model())


@ranks(2)
def test_each_process_holds_half(rank: int, world: int) -> None:
    accelerator = accelerator_with()
    model = make_model()
    full = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_of(model, my_rows(one_batch(), rank, world)))
    optimizer.step()
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    state = sum(entry["exp_avg"].to_local().numel() for entry in optimizer.state.values())
    assert abs(held / full - 0.5) < 0.01
    assert state == held


@ranks(2)
def test_all_processes_start_with_the_values_of_the_first(rank: int, world: int) -> None:
    accelerator = accelerator_with()
    model = accelerator.prepare_model(make_model(seed=rank))
    state = accelerator.get_state_dict(model)
    assert bool(state) == (rank == 0)
    for name, value in state.items():
        assert torch.equal(value, make_model(seed=0).state_dict()[name])


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_only_the_first_process_needs_values(rank: int, world: int, tied: bool) -> None:
    accelerator = accelerator_with(cpu_ram_efficient_loading=True)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = make_model(tied=tied)
        model.register_buffer("scale", torch.tensor([2.0]), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.scale.item() == 2.0
    assert (model.head.weight is model.embedding.weight) == tied
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, make_model(tied=tied).state_dict()[name])
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == set(map(id, model.parameters()))


@ranks(2)
def test_values_that_nobody_has_are_refused(rank: int, world: int) -> None:
    accelerator = accelerator_with()
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ValueError, match="meta device"):
        accelerator.prepare_model(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", ["model first", "optimizer first", "model alone first"])
@ranks(2)
def test_optimizers_keep_groups_and_state(rank: int, world: int, order: str) -> None:
    accelerator = accelerator_with()
    model = make_model()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = MOMENTUM([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}])
    loss_of(model, one_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    twin_optimizer = MOMENTUM(
        [
            {"params": [one for one in twin.parameters() if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in twin.parameters() if one.dim() <= 1], "lr": 0.01},
        ]
    )
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if order == "model first":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "optimizer first":
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    for stepper, one in ((optimizer, model), (twin_optimizer, twin)):
        batch = my_rows(one_batch(), rank, world) if stepper is optimizer else one_batch()
        loss_of(one, batch).backward()
        stepper.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach(), rtol=0, atol=1e-5, msg=name)
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"].to_local()
    assert momentum.untyped_storage().nbytes() == momentum.numel() * momentum.itemsize


@ranks(2)
def test_tied_weights_stay_tied(rank: int, world: int) -> None:
    accelerator = accelerator_with(transformer_cls_names_to_wrap=["Embedding", "Block"])
    model = make_model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = loss_of(model, my_rows(one_batch(), rank, world))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert model.head.weight is model.embedding.weight
    state = accelerator.get_state_dict(model)
    assert bool(state) == (rank == 0)
    assert not state or state["head.weight"] is state["embedding.weight"]  # one copy, in memory and in files
    twin = make_model(tied=True)
    stepper = torch.optim.SGD(twin.parameters(), lr=0.1)
    for expected in losses:
        loss = loss_of(twin, one_batch())
        assert abs(loss.item() - expected) < 1e-5
        loss.backward()
        stepper.step()
        stepper.zero_grad()


class LowRank(nn.Module):
    """A frozen layer with a small trainable one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def make_adapted() -> nn.Module:
    model = make_model().requires_grad_(False)
    torch.manual_seed(0)
    for block in model.blocks:
        block.attention.query = LowRank(block.attention.query)
    return model


@ranks(2)
def test_frozen_parameters_beside_adapters(rank: int, world: int) -> None:
    accelerator = accelerator_with()
    model = make_adapted()
    frozen = model.head.weight.detach().clone()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    twin = make_adapted()
    stepper = torch.optim.AdamW([one for one in twin.parameters() if one.requires_grad], lr=0.01)
    for _ in range(3):
        accelerator.backward(loss_of(model, my_rows(one_batch(), rank, world)))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(twin, one_batch()).backward()
        stepper.step()
        stepper.zero_grad()
    assert torch.equal(model.head.weight.full_tensor(), frozen)
    state = accelerator.get_state_dict(model)
    for name, value in state.items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-5)


@ranks(2)
def test_ignored_modules_are_not_sharded(rank: int, world: int) -> None:
    accelerator = accelerator_with(ignored_modules="head|positions")
    model = accelerator.prepare_model(make_model())
    full = {name for name, one in model.named_parameters() if not hasattr(one, "device_mesh")}
    assert full == {"head.weight", "positions.weight"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(2)
def test_mixed_precision(rank: int, world: int, precision: str) -> None:
    accelerator = accelerator_with(precision)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch, losses = my_rows(one_batch(), rank, world), []
    for _ in range(10):
        logits = model(batch["input_ids"])
        assert logits.dtype == torch.float32
        loss = token_loss(logits, shift(batch["labels"]))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0] - 0.2


@ranks(2)
def test_all_skip_a_step_when_one_process_overflows(rank: int, world: int) -> None:
    accelerator = accelerator_with("fp16")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    scale = accelerator.scaler.get_scale()
    accelerator.backward(loss_of(model, my_rows(one_batch(), rank, world)))
    if rank == 1:
        next(model.parameters()).grad.to_local().fill_(float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() < scale


@ranks(2)
def test_offload_and_checkpointed_activations_change_nothing(rank: int, world: int) -> None:
    options = {"cpu_offload": True, "activation_checkpointing": True, "activation_checkpointing_offload": True}
    accelerator = accelerator_with(**options)
    model = accelerator.prepare_model(make_model())
    loss = loss_of(model, my_rows(one_batch(), rank, world))
    accelerator.backward(loss)
    twin = make_model()
    expected = loss_of(twin, one_batch())
    expected.backward()
    assert abs(accelerator.reduce(loss.detach(), "mean").item() - expected.item()) < 1e-6
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-6, msg=name)
    assert set(accelerator.get_state_dict(model)) == (set(twin.state_dict()) if rank == 0 else set())


@ranks(2)
def test_accumulation_synchronizes_gradients_once(rank: int, world: int) -> None:
    accelerator = accelerator_with(accumulate=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = [my_rows(half, rank, world) for half in (my_rows(one_batch(), 0, 2), my_rows(one_batch(), 1, 2))]
    for part in parts:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, part))
            optimizer.step()
            optimizer.zero_grad()
    twin = make_model()
    stepper = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(twin, one_batch()).backward()
    stepper.step()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_backward_can_reduce_scatter_after_a_forward_under_no_sync(rank: int, world: int, version: int) -> None:
    options = {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy=WRAP, **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.no_sync(model):
        loss = loss_of(model, my_rows(one_batch(), rank, world))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    optimizer.step()
    twin = make_model()
    stepper = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(twin, one_batch()).backward()
    stepper.step()
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-6)


@ranks(2)
def test_norms_over_sharded_and_unsharded_gradients(rank: int, world: int) -> None:
    accelerator = accelerator_with(ignored_modules="head")
    model = accelerator.prepare_model(make_model())
    accelerator.backward(loss_of(model, one_batch()))  # the same rows, so that full gradients agree
    twin = make_model()
    loss_of(twin, one_batch()).backward()
    for norm_type in (2.0, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 1e6, norm_type)
        actual = accelerator.clip_grad_norm_(model.parameters(), 1e6, norm_type)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    nn.utils.clip_grad_value_(twin.parameters(), 1e-3)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=0, atol=1e-7)


@ranks(2)
@pytest.mark.parametrize("size", ["dp_replicate_size", "tp_size", "pp_size"])
def test_a_mesh_without_ranks_to_shard_over_is_refused(rank: int, world: int, size: str) -> None:
    with pytest.raises(ValueError, match=rf"ParallelismConfig\({size}=2\) leaves no ranks .* Set dp_shard_size"):
        accelerator_with(config=ParallelismConfig(**{size: 2}))


def test_reference_trains() -> None:
    losses = reference_curve(10, 8, torch.optim.AdamW)
    assert losses[-1] < losses[0]
