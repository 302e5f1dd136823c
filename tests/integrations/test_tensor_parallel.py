"""Tensor parallelism: plans, what they refuse, and what a model is afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.styles import STYLES, check_plan, expand_plan
from accel_ops.modules import to_local
from accel_ops.random import set_seed
from accel_state.mesh import ParallelismConfig
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.parallelism import TorchTensorParallelConfig, TorchTensorParallelPlugin
from accelerate import Accelerator
from tests.integrations.training import assert_same_gradients
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_loader, make_model, shift, token_loss


def accelerator_with(plan: Any = TP_PLAN, tp_size: int = 2, dp_replicate_size: int = 1, **options: Any) -> Accelerator:
    handler = TorchTensorParallelConfig(plan=plan)
    config = ParallelismConfig(tp_size=tp_size, dp_replicate_size=dp_replicate_size, tp_handler=handler)
    return Accelerator(cpu=True, parallelism_config=config, **options)


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_pattern_stands_for_one_part_of_a_name() -> None:
    plan = expand_plan(make_model(), {"blocks.*.mlp.up": "colwise"})
    assert plan == {"blocks.0.mlp.up": "colwise", "blocks.1.mlp.up": "colwise"}


def test_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.\*.mpl.up', but TinyTransformer .* 'blocks.\*.mlp.up'"):
        expand_plan(make_model(), {"blocks.*.mpl.up": "colwise"})
    with pytest.raises(ValueError, match=f"'columns', which are not known. Use {', '.join(STYLES)}"):
        check_plan(make_model(), {"head": "columns"}, 2)
    with pytest.raises(ValueError, match=r"tp_size=5 does not divide head \(out_features=32\)"):
        check_plan(make_model(), {"head": "colwise"}, 5)


# ---- what is refused ------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_model_without_a_plan_is_refused() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    model = make_model()
    with pytest.raises(ValueError, match=r"tp_size=2 needs a plan for TinyTransformer, .*tp_handler"):
        accelerator.prepare(model)
    assert all(to_local(parameter) is parameter for parameter in model.parameters())


@ranks(2)
def test_models_that_are_tied_or_sharded_in_another_way_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    accelerator = accelerator_with({**TP_PLAN, "embedding": "embedding_colwise"})
    with pytest.raises(ValueError, match="embedding.weight and head.weight are one parameter"):
        accelerator.prepare(make_model(tied=True))
    model = make_model()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    parallelize_module(model, alone, {"head": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"sharded over 1 ranks already \(head.weight is\), but .* tp_size=2"):
        accelerator.prepare(model)


# ---- what a model is afterwards -------------------------------------------------------------------------------------


@ranks(2)
def test_every_rank_holds_its_shard_of_one_model_even_if_they_were_seeded_differently(rank: int) -> None:
    torch.manual_seed(rank)
    accelerator = accelerator_with()
    model = accelerator.prepare(make_model(seed=rank))
    full = accelerator.get_state_dict(model)
    expected = make_model(seed=0).state_dict()
    assert all(torch.equal(full[name], expected[name]) for name in expected)
    shard = expected["blocks.0.mlp.up.weight"].chunk(2)[rank]
    assert torch.equal(to_local(model.blocks[0].mlp.up.weight), shard)
    drawn = torch.rand(3)
    everywhere = [torch.empty(3) for _ in range(2)]
    dist.all_gather(everywhere, drawn)
    assert torch.equal(everywhere[0], everywhere[1])


@ranks(2)
def test_a_plan_may_be_an_attribute_of_the_model_or_hold_objects_of_torch() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model = make_model()
    model.tp_plan = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
    prepared = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2)).prepare(model)
    tokens = torch.arange(8).view(1, 8)
    assert torch.allclose(prepared(tokens), make_model()(tokens), atol=1e-6)
    assert to_local(prepared.blocks[0].mlp.up.weight).shape == (32, 16)


@ranks(2)
def test_an_optimizer_made_before_keeps_groups_and_state() -> None:
    model = make_model()
    decayed = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.25}])
    token_loss(model(torch.ones(1, 8, dtype=torch.long)), torch.ones(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    moments = [optimizer.state[one]["exp_avg"].clone() for one in decayed]
    model, optimizer = accelerator_with().prepare(model, optimizer)
    mine = {id(parameter) for parameter in model.parameters()}
    assert all(id(one) in mine for group in optimizer.param_groups for one in group["params"])
    assert [group["weight_decay"] for group in optimizer.param_groups][0] == 0.5
    assert [group["lr"] for group in optimizer.param_groups][1] == 0.25
    for parameter, moment in zip(optimizer.param_groups[0]["params"], moments, strict=True):
        state = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(state.full_tensor() if hasattr(state, "full_tensor") else state, moment)


@ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_uses_full_gradients(norm_type: float) -> None:
    batch = next(iter(make_loader(4)))
    plain = make_model()
    token_loss(plain(batch["input_ids"]), shift(batch["labels"])).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=norm_type)
    accelerator = accelerator_with()
    model = accelerator.prepare(make_model())
    accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
    assert torch.allclose(norm, expected, rtol=1e-5)
    assert_same_gradients(model, plain)


@ranks(4)
def test_replicas_accumulate_without_sync(rank: int) -> None:
    """Two micro-batches of one process each equal one batch of all."""
    data = make_loader(8, count=16)
    plain = make_model()
    for batch in data:
        (token_loss(plain(batch["input_ids"]), shift(batch["labels"])) / 2).backward()
    accelerator = accelerator_with(tp_size=2, dp_replicate_size=2, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(make_model(), make_loader(4, count=16))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
    assert_same_gradients(model, plain)


@ranks(2)
def test_norms_on_shards_of_the_sequence(rank: int) -> None:
    plan = {
        "blocks.0.mlp.up": "colwise_from_sequence",
        "blocks.0.mlp.down": "rowwise_to_sequence",
        "blocks.0.norm2": "sequence_parallel",
    }
    torch.manual_seed(0)
    hidden = torch.randn(2, 8, 16)
    plain = make_model().blocks[0]
    expected = plain.mlp(plain.norm2(hidden))
    expected.square().mean().backward()
    accelerator = accelerator_with(plan)
    model = accelerator.prepare(make_model())
    block = model.blocks[0]
    output = block.mlp(block.norm2(hidden.chunk(2, dim=1)[rank]))
    assert torch.allclose(output, expected.detach().chunk(2, dim=1)[rank], atol=1e-6)
    (output.square().sum() / expected.numel()).backward()
    gradient = block.norm2.weight.grad
    assert gradient.placements == block.norm2.weight.placements
    assert torch.allclose(gradient.full_tensor(), plain.norm2.weight.grad, atol=1e-6)
    norm = accelerator.clip_grad_norm_([block.norm2.weight], 1e9)
    assert torch.allclose(norm, plain.norm2.weight.grad.norm(), atol=1e-6)


@ranks(4)
def test_replicas_draw_numbers_of_their_own_and_can_be_copied(rank: int) -> None:
    model = accelerator_with(dp_replicate_size=2).prepare(make_model())
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    set_seed(7, device_specific=True)
    drawn = [torch.empty(1) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(1))
    first, second, third, fourth = (one.item() for one in drawn)
    assert first == second
    assert third == fourth
    assert first != third


@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_dropout_is_that_of_one_process_and_tied_parameters_stay_one(tied: bool) -> None:
    batch = next(iter(make_loader(4)))
    plain = make_model(dropout=0.5, tied=tied)
    model = accelerator_with().prepare(make_model(dropout=0.5, tied=tied))
    assert (model.embedding.weight is model.head.weight) == tied
    torch.manual_seed(3)
    expected = plain(batch["input_ids"])
    torch.manual_seed(3)
    assert torch.allclose(model(batch["input_ids"]), expected, atol=1e-6)


@ranks(4)
def test_processes_of_one_model_read_the_same_and_are_gathered_once(rank: int) -> None:
    accelerator = accelerator_with(tp_size=2, dp_replicate_size=2)
    loader = accelerator.prepare(make_loader(3, count=14, shuffle=True))
    seen = []
    for batch in loader:
        everywhere = [torch.empty_like(batch["input_ids"]) for _ in range(4)]
        dist.all_gather(everywhere, batch["input_ids"])
        assert torch.equal(everywhere[0], everywhere[1])
        assert torch.equal(everywhere[2], everywhere[3])
        assert not torch.equal(everywhere[0], everywhere[2])
        seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
    rows = sorted(map(tuple, torch.cat(seen).tolist()))
    expected = sorted(tuple(row) for batch in make_loader(14, count=14) for row in batch["input_ids"].tolist())
    assert rows == expected
    objects = accelerator.gather_for_metrics([f"sample of rank {rank}"], use_gather_object=True)
    assert objects == [f"sample of rank {rank % 2}", f"sample of rank {2 + rank % 2}"]


@ranks(2)
def test_the_old_plugin_is_a_tensor_parallel_axis_over_which_nothing_is_gathered() -> None:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.tensor_parallel_rank == accelerator.process_index
    assert accelerator.torch_device_mesh["tp"].size() == 2
    assert accelerator.gather_for_metrics(torch.tensor(3.0)).tolist() == [3.0]
    assert accelerator.gather_for_metrics(["one"], use_gather_object=True) == ["one"]


@ranks(2)
def test_a_dispatched_batch_goes_to_all_ranks_of_a_tp_group_and_counts_once_for_schedules(rank: int) -> None:
    accelerator = accelerator_with(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    seen = [batch["input_ids"] for batch in accelerator.prepare(make_loader(4, count=8))]
    expected = [batch["input_ids"] for batch in make_loader(4, count=8)]
    assert all(map(torch.equal, seen, expected))
    assert len(seen) == 2
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    optimizer.step()
    scheduler.step()  # two processes, but one batch
    assert scheduler.get_last_lr() == [0.5]
