"""`prepare_pippy`: the same outputs as one process, from models that are split or traced."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import PartialState
from accelerate.inference import (
    build_pipeline,
    find_pippy_batch_size,
    generate_device_map,
    pippy_forward,
    prepare_pippy,
)
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_model

IDS = torch.arange(5 * 16).view(5, 16) % 32


class Skipping(nn.Module):
    """A model whose output adds up what all layers return, so that it must be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for layer in self.layers:
            x = layer(x)
            total = total + x
        return total


class Deciding(Skipping):
    """Likewise, and it looks at its numbers, so that it cannot be traced either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x)
        return total if float(total.sum()) > 0 else -total


def seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


@ranks(2, 4)
def test_a_model_is_split_between_its_blocks(rank: int, world: int) -> None:
    PartialState(cpu=True)
    expected = make_model(layers=4)(IDS)
    model = prepare_pippy(make_model(layers=4), example_args=(IDS,))
    actual = model(IDS)
    if rank == world - 1:
        torch.testing.assert_close(actual, expected)
        assert not actual.requires_grad
    else:
        assert actual is None
    held = {name for name, _ in model.named_parameters()}
    assert ("head.weight" in held) is (rank == world - 1)
    assert len(model.hf_split_points) == world - 1


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
@ranks(2)
def test_batches_of_any_size_and_length(rank: int, world: int, num_chunks: int) -> None:
    PartialState(cpu=True)
    full = make_model(layers=3)
    model = prepare_pippy(make_model(layers=3), split_points=["blocks.1"], num_chunks=num_chunks, gather_output=True)
    assert model.hf_split_points == ["blocks.1"]
    for size, length in ((1, 16), (5, 16), (4, 7)):
        given = IDS[:size, :length] if rank == 0 else IDS[:1, :2]  # those of the first process count
        torch.testing.assert_close(model(given), full(IDS[:size, :length]))


@ranks(2)
def test_a_sequence_of_layers(rank: int, world: int) -> None:
    PartialState(cpu=True)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.BatchNorm1d(8))

    inputs = torch.linspace(0, 1, 40).view(5, 8)
    model = prepare_pippy(seeded(make), example_args=(inputs,), gather_output=True)
    torch.testing.assert_close(model(inputs), seeded(make)(inputs))


@ranks(2)
def test_what_cannot_be_split_is_traced(rank: int, world: int) -> None:
    PartialState(cpu=True)
    inputs = torch.linspace(0, 1, 40).view(5, 8)
    model = prepare_pippy(seeded(Skipping), split_points=["layers.2"], example_args=(inputs[:4],), gather_output=True)
    for batch in (inputs, inputs[:1], inputs[:4]):
        (actual,) = model(batch) if isinstance(model(batch), tuple) else (model(batch),)
        torch.testing.assert_close(actual, seeded(Skipping)(batch))
    with pytest.raises(ValueError, match=r"traced for inputs of shapes \[\(8,\)\]"):
        model(torch.zeros(4, 9))


@ranks(2)
def test_what_can_neither_be_split_nor_traced(rank: int, world: int) -> None:
    PartialState(cpu=True)
    model = seeded(Deciding)
    with pytest.raises(
        ValueError, match="(?s)Deciding cannot be traced: .* cannot be split between its modules either"
    ):
        prepare_pippy(model, example_args=(torch.ones(4, 8),))
    assert sum(1 for _ in model.parameters()) == 8  # as it was
    assert model(torch.ones(4, 8)).shape == (4, 8)
    with pytest.raises(ValueError, match=r"no module 'layer.2'. Did you mean 'layers.2'.*pass example_args"):
        prepare_pippy(model, split_points=["layer.2"])


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@ranks(2)
def test_transformers(rank: int, world: int) -> None:
    import transformers

    PartialState(cpu=True)
    sizes = {"vocab_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    mask = torch.ones_like(IDS)
    mask[0, 9:] = 0
    for name, config in (
        ("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, eos_token_id=0)),
        ("LlamaForCausalLM", transformers.LlamaConfig(**sizes, intermediate_size=16, num_key_value_heads=2)),
        ("BertForSequenceClassification", transformers.BertConfig(**sizes, intermediate_size=16)),
    ):
        make = getattr(transformers, name)
        expected = seeded(lambda make=make, config=config: make(config))(IDS, attention_mask=mask)
        model = prepare_pippy(
            seeded(lambda make=make, config=config: make(config)),
            example_args=(IDS,),
            example_kwargs={"attention_mask": mask},
            gather_output=True,
        )
        actual = model(IDS, attention_mask=mask)
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual.logits, expected.logits)


@ranks(2)
def test_the_parts_can_be_used_by_themselves(rank: int, world: int) -> None:
    PartialState(cpu=True)
    inputs = torch.linspace(0, 1, 40).view(5, 8)
    schedule = build_pipeline(seeded(Skipping), ["layers.1"], (inputs,), None, 2)
    actual = pippy_forward(schedule.step, 2, True, inputs)
    torch.testing.assert_close(actual, seeded(Skipping)(inputs))


def test_one_process_has_the_full_model_and_arguments_that_are_not_allowed_are_refused() -> None:
    PartialState(cpu=True)
    model = prepare_pippy(make_model())
    torch.testing.assert_close(model(IDS), make_model()(IDS))
    assert model.hf_split_points == []
    with pytest.raises(ValueError, match="num_chunks=0"):
        prepare_pippy(make_model(), num_chunks=0)
    with pytest.raises(ValueError, match="Pass 'auto' or a list"):
        prepare_pippy(make_model(), split_points="blocks.1")


def test_sizes_of_batches_and_maps_of_devices() -> None:
    assert find_pippy_batch_size((None, "x"), {"ids": IDS}) == 5
    assert find_pippy_batch_size((), None) is None
    places = generate_device_map(make_model(layers=4), 2, ["Block"])
    assert set(places.values()) == {0, 1}
    assert list(places.values()) == sorted(places.values())
