"""Context parallelism: blocks in which every process works on its part of the sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as functional
from torch import nn

from accel_integrations.parallel.torch_ring import ring_attention
from accel_state.mesh import ParallelismConfig
from accel_state.settings.parallelism import TorchContextParallelConfig
from accelerate import Accelerator
from tests.integrations.test_sequence_parallel import Masked, OwnAttention
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_model


def accelerator_with(**options: object) -> Accelerator:
    handler = TorchContextParallelConfig(**options)  # type: ignore[arg-type]
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, cp_handler=handler))


@ranks(2)
def test_buffers_are_sharded_within_and_restored_afterwards(rank: int) -> None:
    accelerator = accelerator_with()
    kept, given_up = torch.arange(8).view(1, 8), torch.arange(16.0).view(1, 8, 2)
    with accelerator.maybe_context_parallel([kept, given_up], [1, -2], no_restore_buffers={given_up}):
        own = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]  # an early and a late piece
        assert kept.tolist() == [own]
        assert given_up[0, :, 0].tolist() == [2.0 * place for place in own]
    assert kept.tolist() == [list(range(8))]
    assert given_up.shape == (1, 4, 2)
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert not ring_attention()._replaced_functions, "one more is kept in each step"


class Attention(nn.Module):
    """One attention, causal or not."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 24)
        self.is_causal = is_causal

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, 8) to the same."""
        heads = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.layer(hidden).chunk(3, -1))
        output = functional.scaled_dot_product_attention(*heads, is_causal=self.is_causal)
        return output.transpose(1, 2).flatten(2)


@ranks(2)
def test_attention_without_causal_mask_needs_chunks_in_order(rank: int) -> None:
    hidden = torch.randn(2, 8, 8)
    expected = Attention(is_causal=False)(hidden)
    accelerator = accelerator_with(cp_load_balance=False)
    model = accelerator.prepare(Attention(is_causal=False))
    buffer = hidden.clone()
    with accelerator.maybe_context_parallel([buffer], [1]):
        output = model(buffer)
        accelerator.backward(output.sum())
    assert torch.allclose(output, expected.chunk(2, dim=1)[rank], atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
def test_exchanges_on_the_cpu_come_one_at_a_time(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Two at once, in one group of gloo, end the process now and then."""
    under_way = []
    for name in ("all_gather_tensor", "all_gather_single", "permute_tensor"):
        if hasattr(functional_collectives, name):
            begin = getattr(functional_collectives, name)

            def counted(*arguments: object, begin: Any = begin, **options: object) -> Any:
                under_way.append(torch._C._distributed_c10d._get_work_registry_size())
                return begin(*arguments, **options)

            monkeypatch.setattr(functional_collectives, name, counted)
    accelerator = accelerator_with(cp_comm_strategy=strategy)
    model = accelerator.prepare(Attention(is_causal=True))
    buffer = torch.randn(2, 8, 8)
    with accelerator.maybe_context_parallel([buffer], [1]):
        accelerator.backward(model(buffer).sum())
    assert under_way == [0] * 4, "forward: keys and values; backward: them, their gradients twice"


@ranks(2)
def test_sequences_of_odd_chunks_are_sharded_in_order_and_outside_of_the_context_nothing_is(rank: int) -> None:
    accelerator = accelerator_with()
    buffer = torch.arange(6).view(1, 6)
    with accelerator.maybe_context_parallel([buffer], [1]):
        assert buffer.tolist() == [[[0, 1, 2], [3, 4, 5]][rank]]
    model = accelerator.prepare(make_model())
    tokens = torch.arange(8).view(1, 8)
    assert torch.allclose(model(tokens), make_model()(tokens), atol=1e-6)


@ranks(2)
def test_buffers_that_cannot_be_sharded_are_refused() -> None:
    accelerator = accelerator_with()
    tokens = torch.zeros(1, 5, dtype=torch.long)
    cases = [
        (([tokens], [1]), "Buffer 0 of shape .1, 5. has 5 tokens, which cp_size=2 does not divide"),
        (([tokens], [2]), "has no dimension 2"),
        (([tokens], []), "got 1 buffers and 0 sequence dimensions"),
        ((None, None), "got 0 buffers"),
        (([torch.zeros(2, 4, requires_grad=True)], [1]), "requires gradients"),
        (([tokens[:, :4]], [1], {tokens}), "1 tensors that are not among the buffers"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message), accelerator.maybe_context_parallel(*arguments):
            pass


@ranks(2)
def test_attention_that_cannot_be_sharded_is_refused() -> None:
    accelerator = accelerator_with()
    for model, buffer, error, message in (
        (Attention(is_causal=False), torch.ones(1, 8, 8), ValueError, "cp_load_balance=False"),
        (OwnAttention(), torch.ones(1, 4, 4), RuntimeError, "OwnAttention never called"),
        (Masked(), torch.ones(1, 2, 4, 4), ValueError, "cannot use an attention mask"),
    ):
        prepared = accelerator.prepare(model)
        with pytest.raises(error, match=message), accelerator.maybe_context_parallel([buffer], [1]):
            prepared(buffer)
        assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    buffer = torch.ones(1, 2, 4, 4)
    with (
        pytest.raises(ValueError, match="does not support attention dropout on the CPU, but got dropout_p=0.5"),
        accelerator.maybe_context_parallel([buffer], [2]),
    ):
        functional.scaled_dot_product_attention(buffer, buffer, buffer, dropout_p=0.5, is_causal=True)


def test_without_the_axis_a_block_is_any_block() -> None:
    tokens = torch.arange(3)
    with Accelerator(cpu=True).maybe_context_parallel([tokens], [0]):
        assert tokens.tolist() == [0, 1, 2]
