"""Parameters divided by `fully_shard`: what is divided, in which formats, and what optimizers see of it.

What version 1 does in the same way is tried here, too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss


def accelerator_with(
    precision: str = "no", accumulate: int = 1, config: Any = None, version: int = 2, **options: Any
) -> Accelerator:
    options = {"auto_wrap_policy": "transformer_based_wrap", "use_orig_params": version == 1 or None, **options}
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, **options),
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
    AcceleratorState._reset_state()
    accelerator = accelerator_with(auto_wrap_policy="size_based_wrap", min_num_params=2000)
    assert sharded_modules(accelerator.prepare_model(make_model())) == ["", "blocks.0.mlp", "blocks.1.mlp"]


@ranks(2)
def test_unknown_classes_and_values_that_nobody_has_are_refused(rank: int, world: int) -> None:
    accelerator = accelerator_with(transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(ValueError, match="'Blok'.*Block"):
        accelerator.prepare_model(make_model())
    with torch.device("meta"):
        model = make_model()
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
    with pytest.raises(ValueError, match="meta device"):
        accelerator.prepare_model(model)


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


@pytest.mark.parametrize(("elsewhere", "tied"), [("cpu", False), ("meta", False), ("meta", True)])
@ranks(2)
def test_all_processes_start_with_the_values_of_the_first_which_only_it_needs(
    rank: int, world: int, elsewhere: str, tied: bool
) -> None:
    accelerator = accelerator_with(cpu_ram_efficient_loading=elsewhere == "meta")
    with torch.device("cpu" if rank == 0 else elsewhere):
        model = make_model(tied=tied, seed=rank)
        model.register_buffer("scale", torch.tensor([2.0]), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.scale.item() == 2.0
    assert (model.head.weight is model.embedding.weight) == tied
    state = accelerator.get_state_dict(model)
    assert bool(state) == (rank == 0)
    for name, value in state.items():
        assert torch.equal(value, make_model(tied=tied).state_dict()[name])
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == set(map(id, model.parameters()))


def momentum_in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", ["model first", "optimizer first", "model alone first"])
@ranks(2)
def test_optimizers_keep_groups_and_state(rank: int, world: int, order: str) -> None:
    accelerator = accelerator_with()
    model = make_model()
    optimizer = momentum_in_two_groups(model)
    loss_of(model, one_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    twin_optimizer = momentum_in_two_groups(twin)
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


def train(model: Any, optimizer: Any, backward: Any, batch: Any) -> list[float]:
    """The losses of three steps."""
    losses = []
    for _ in range(3):
        loss = loss_of(model, batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_tied_weights_stay_tied(rank: int, world: int) -> None:
    accelerator = accelerator_with(transformer_cls_names_to_wrap=["Embedding", "Block"])
    model = make_model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = train(model, optimizer, accelerator.backward, my_rows(one_batch(), rank, world))
    losses = [accelerator.reduce(torch.tensor(loss), "mean").item() for loss in losses]
    assert model.head.weight is model.embedding.weight
    state = accelerator.get_state_dict(model)
    assert bool(state) == (rank == 0)
    assert not state or state["head.weight"] is state["embedding.weight"]  # one copy, in memory and in files
    twin = make_model(tied=True)
    stepper = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert train(twin, stepper, torch.Tensor.backward, one_batch()) == pytest.approx(losses, abs=1e-5)


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
    train(model, optimizer, accelerator.backward, my_rows(one_batch(), rank, world))
    train(twin, stepper, torch.Tensor.backward, one_batch())
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


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(2)
def test_mixed_precision(rank: int, world: int, precision: str, version: int) -> None:
    accelerator = accelerator_with(precision, version=version)
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


@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_accumulation_synchronizes_gradients_once(rank: int, world: int, version: int) -> None:
    accelerator = accelerator_with(accumulate=2, version=version)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = [my_rows(half, rank, world) for half in (my_rows(one_batch(), 0, 2), my_rows(one_batch(), 1, 2))]
    for part in parts:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, part))
            optimizer.step()
            optimizer.zero_grad()
    assert_trained_once(accelerator, model)


def assert_trained_once(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that the weights are those after one step with the whole batch."""
    twin = make_model()
    loss_of(twin, one_batch()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_backward_can_reduce_scatter_after_a_forward_under_no_sync(rank: int, world: int, version: int) -> None:
    accelerator = accelerator_with(version=version)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.no_sync(model):
        loss = loss_of(model, my_rows(one_batch(), rank, world))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    optimizer.step()
    assert_trained_once(accelerator, model)


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
