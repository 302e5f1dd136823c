"""Sequence parallelism without DeepSpeed: attention over full sequences, of which every rank holds a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_integrations.parallel.sequence import ulysses_attention
from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from tests.integrations.training import assert_same_gradients
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_loader, make_model, shift, token_loss


def make_accelerator() -> Accelerator:
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))


@pytest.mark.sample(2)
@ranks(2)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_is_that_of_full_sequences(rank: int, world: int, is_causal: bool, key_heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, key_heads, key_heads))
    options = {"is_causal": is_causal, "enable_gqa": key_heads < 4}
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    expected.square().sum().backward()
    own = [one.detach().chunk(world, dim=2)[rank].clone().requires_grad_() for one in (query, key, value)]
    group = torch.distributed.group.WORLD
    output = ulysses_attention(functional.scaled_dot_product_attention, group)(*own, **options)
    assert torch.allclose(output, expected.chunk(world, dim=2)[rank], atol=1e-6)
    output.square().sum().backward()
    for part, full in zip(own, (query, key, value), strict=True):
        assert torch.allclose(part.grad, full.grad.chunk(world, dim=2)[rank], atol=1e-5)


@ranks(2)
def test_shards_of_a_batch_give_the_logits_of_the_full_batch(rank: int) -> None:
    accelerator = make_accelerator()
    model, loader = accelerator.prepare(make_model(), make_loader(4))
    batch, full = next(iter(loader)), next(iter(make_loader(4)))
    expected = make_model()(full["input_ids"]).chunk(2, dim=1)[rank]
    assert torch.allclose(model(batch["input_ids"], batch["position_ids"]), expected, atol=1e-6)
    assert torch.equal(batch["shift_labels"], shift(full["labels"]).chunk(2, dim=1)[rank])
    again = next(iter(skip_first_batches(loader, 1)))
    assert again["input_ids"].shape == (4, 8)


class Checkpointed(nn.Module):
    """Runs the blocks of a model again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token numbers to logits."""
        inner: Any = self.inner
        hidden = inner.embedding(tokens) + inner.positions(positions)
        for block in inner.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return inner.head(inner.norm(hidden))


@ranks(2)
def test_what_is_recomputed_in_backward_shards_its_attention_too(rank: int) -> None:
    full = next(iter(make_loader(4)))
    plain = make_model()
    token_loss(plain(full["input_ids"]), shift(full["labels"])).backward()
    accelerator = make_accelerator()
    model, loader = accelerator.prepare(Checkpointed(make_model()), make_loader(4))
    batch = next(iter(loader))
    loss = token_loss(model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])
    accelerator.backward(accelerator.mean_over_tokens(loss, (batch["shift_labels"] != -100).sum()))
    gradients = dict(accelerator.unwrap_model(model).inner.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.allclose(gradients[name].grad, parameter.grad, atol=1e-6), name
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@ranks(2)
def test_processes_without_tokens_take_part(rank: int) -> None:
    """All labels that count are in the first part."""
    tokens = torch.arange(16).view(1, 16)
    labels = torch.where(torch.arange(16) < 6, tokens, -100)
    plain = make_model()
    expected = token_loss(plain(tokens), shift(labels))
    expected.backward()
    accelerator = make_accelerator()
    model = accelerator.prepare(make_model())
    part = slice(8 * rank, 8 * rank + 8)
    own = shift(labels)[:, part]
    loss = token_loss(model(tokens[:, part], torch.arange(16)[part]), own)
    loss = accelerator.mean_over_tokens(loss, (own != -100).sum())
    assert torch.allclose(loss, expected, atol=1e-6)
    accelerator.backward(loss)
    assert_same_gradients(model, plain)


@ranks(4)
@pytest.mark.parametrize("other", ["tp_size", "dp_replicate_size"])
def test_windows_are_averaged_by_tokens(rank: int, world: int, other: str) -> None:
    """Parts of two micro-batches with different numbers of tokens give the gradient of one batch."""
    full = next(iter(make_loader(8)))
    labels = shift(full["labels"])
    labels[:3, 4:] = -100
    plain = make_model()
    token_loss(plain(full["input_ids"]), labels).backward()
    config = ParallelismConfig(sp_size=2, sp_backend="torch", **{other: 2})
    if other == "tp_size":
        config.tp_handler.plan = TP_PLAN
    plugin = GradientAccumulationPlugin(num_steps=2, average_over="weights")
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_plugin=plugin)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shard, part = accelerator.engine.data_shard(), accelerator.torch_device_mesh.get_local_rank("sp")
    rows = torch.arange(8).chunk(shard.count)[shard.index].chunk(2)
    span = slice(8 * part, 8 * part + 8)
    for micro in rows:
        with accelerator.accumulate(model):
            own = labels[micro, span]
            loss = token_loss(model(full["input_ids"][micro, span], torch.arange(16)[span]), own)
            accelerator.backward(loss, weight=(own != -100).sum())
            accelerator.unscale_gradients()
    assert_same_gradients(model, plain)


# ---- what is refused ------------------------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    """Attention as one writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, 4) to the same."""
        hidden = self.layer(hidden)
        return (hidden @ hidden.mT).softmax(-1) @ hidden


@ranks(2)
def test_attention_by_hand_is_found_at_the_first_forward() -> None:
    model = make_accelerator().prepare(OwnAttention())
    with pytest.raises(RuntimeError, match="OwnAttention never called .*scaled_dot_product_attention"):
        model(torch.ones(1, 2, 4))
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


class Masked(nn.Module):
    """Attention with a mask."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, heads, sequence, features) to the same."""
        mask = torch.ones(hidden.shape[2], hidden.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)


@ranks(2)
def test_masks_odd_heads_and_the_backend_of_deepspeed_without_it_are_refused() -> None:
    model = make_accelerator().prepare(Masked())
    with pytest.raises(ValueError, match=r"cannot use an attention mask \(got one of shape \(3, 3\)\)"):
        model(torch.ones(1, 2, 3, 4))
    attend = ulysses_attention(functional.scaled_dot_product_attention, torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match="cannot split 3 attention heads evenly over 2 ranks"):
        attend(*[torch.ones(1, 3, 2, 4)] * 3)
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="sp_backend='deepspeed' needs DeepSpeed.* sp_backend='torch'"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"))
