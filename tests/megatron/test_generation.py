"""Generation with a model in shards: token for token what transformers generates with the same weights in one process."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accel_integrations.megatron.generation import GenerationOptions, Prompts, draw
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin, broadcast
from tests.megatron.training import TOKENS, megatron_ranks, new_batch, new_model, optimizer_of, run_with

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}  # transformers takes 0 for none in beam search


def new_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 8, 5 and 3 tokens, padded on the left, and their mask."""
    tokens = torch.randint(4, TOKENS, (3, 8), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, :3] = mask[2, :5] = 0
    return tokens.masked_fill(mask == 0, 3), mask


def on_the_right(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same prompts, padded on the right."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)


def an_end(plain: Any) -> int:
    """A token that greedy decoding comes to in one of the prompts, so that texts end at different times."""
    tokens, mask = new_prompts()
    text = plain.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
    return int(text[0, 10])


def check_against_transformers(accelerator: Accelerator, model: Any, plain: Any) -> None:
    """Greedy decoding, beam search, ends of texts, and both paddings."""
    tokens, mask = new_prompts()
    exact: dict[str, Any] = {"attention_mask": mask, "do_sample": False}
    for options in (
        {"max_new_tokens": 6},
        {"max_length": 12},
        {"max_new_tokens": 8, "eos_token_id": an_end(plain)},
        {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": None},
        {"max_new_tokens": 6, "num_beams": 4, "length_penalty": 1.5, "eos_token_id": an_end(plain)},
    ):
        expected = plain.generate(tokens, **exact, **options)
        assert torch.equal(model.generate(input_ids=tokens, **exact, **options), expected), options
        assert torch.equal(model.megatron_generate(tokens, mask, **options), expected), options
    right, right_mask = on_the_right(tokens, mask)
    text, expected = (
        model.megatron_generate(right, right_mask, max_new_tokens=6),
        plain.generate(tokens, **exact, max_new_tokens=6),
    )
    for line, theirs, start in zip(text, expected, (0, 3, 5), strict=True):
        assert torch.equal(line[: 14 - start], theirs[start:])
        assert (line[14 - start :] == 3).all()
    with_first = model.megatron_generate(tokens[:1], max_new_tokens=3, add_BOS=True)
    first = torch.cat([torch.ones(1, 1).long(), tokens[:1]], dim=1)
    assert torch.equal(with_first, plain.generate(first, max_new_tokens=3, do_sample=False))
    drawn = [model.megatron_generate(tokens, mask, max_new_tokens=6, temperature=3.0) for _ in range(2)]
    assert not torch.equal(*drawn)  # other random numbers each time,
    for one in drawn:  # the same on all ranks
        assert torch.equal(one, broadcast(one.clone()))
    for options in ({"top_k": 1}, {"top_p": 1e-9, "top_p_decay": 0.5}):
        assert torch.equal(model.megatron_generate(tokens, mask, max_new_tokens=6, **options), expected), options


@megatron_ranks(4)
def test_texts_are_those_of_transformers(rank: int, world: int) -> None:
    for layout, kind, options in (
        ({"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}, "Llama", {}),
        ({"tp_degree": 4}, "GPT2", {}),
        ({"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}, "GPT2", {}),
        ({"tp_degree": 2, "sequence_parallelism": True, "context_parallel_size": 2}, "Llama", {}),
    ):  # fmt: skip
        options = options | SPECIAL | ({"num_key_value_heads": 4} if kind == "Llama" else {})
        with run_with(MegatronLMPlugin(**layout)) as accelerator:
            model = accelerator.prepare(new_model(kind, **options))
            assert model.training
            check_against_transformers(accelerator, model, new_model(kind, **options).eval())
            assert model.training


@megatron_ranks(2)
def test_what_cannot_be_generated_is_refused(rank: int, world: int) -> None:
    tokens, mask = new_prompts()
    hole = mask.clone()
    hole[0, 4] = 0
    with run_with(MegatronLMPlugin(tp_degree=2)) as accelerator:
        model = new_model()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        before = model(**new_batch(2)).loss
        assert before.isfinite()
        assert model.generate(tokens).shape == (3, 28)
        for error, words, arguments in (
            (ValueError, "top_k=0 and top_p=0.0 together", {"top_k": 0, "top_p": 0.0}),
            (ValueError, "top_k=-1, but it must be at least 0", {"top_k": -1}),
            (ValueError, "top_p=1.5, but it must be from 0 to 1", {"top_p": 1.5}),
            (ValueError, "temperature=0, but it must be above 0", {"temperature": 0}),
            (ValueError, "num_beams=2 cannot be combined with drawn tokens", {"num_beams": 2, "top_k": 3}),
            (ValueError, "max_length=8, but the prompts have 8 tokens", {"max_length": 8}),
            (
                ValueError,
                "8 tokens of the longest prompt and 25 new ones are more than the 32",
                {"max_new_tokens": 25},
            ),
            (ValueError, "attention_mask has the shape", {"attention_mask": mask[:1]}),
            (ValueError, "attention_mask of prompt 0 is", {"attention_mask": hole}),
            (ValueError, "Pass bos_token_id", {"add_BOS": True, "bos_token_id": None}),
            (TypeError, "'labels', which Megatron-LM's generation does not have", {"labels": tokens}),
        ):
            model.parts.original.generation_config.bos_token_id = None
            with pytest.raises(error, match=words):
                model.generate(tokens, **arguments)
        with pytest.raises(ValueError, match="generate.. got no prompts"):
            model.generate()
        with pytest.raises(ValueError, match=r"The prompts are \(8,\)"):
            model.generate(tokens[0])


def test_the_most_probable_tokens_are_drawn_as_often_as_they_should() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)[:, [2, 0, 3, 1]]
    generator = torch.Generator().manual_seed(0)
    for options, top_p, expected in (
        (GenerationOptions(), 0.0, {0: 0.15, 1: 0.5, 2: 0.05, 3: 0.3}),
        (GenerationOptions(top_k=2), 0.0, {1: 0.625, 3: 0.375}),
        (GenerationOptions(), 0.7, {1: 0.625, 3: 0.375}),
        (GenerationOptions(temperature=0.5), 1.0, {0: 0.0616, 1: 0.6849, 2: 0.0068, 3: 0.2466}),
    ):
        counts = draw(logits.clone(), options, top_p, generator).bincount(minlength=4) / len(logits)
        for token, share in enumerate(counts.tolist()):
            assert share == pytest.approx(expected.get(token, 0.0), abs=0.015), (options, top_p)


def test_prompts_keep_their_columns() -> None:
    tokens, mask = new_prompts()
    prompts = Prompts.of(tokens, mask, None)
    assert (prompts.starts, prompts.columns, prompts.longest) == ([0, 3, 5], 8, 8)
    assert torch.equal(prompts.continued(prompts.rows, 3), tokens)
    with pytest.raises(ValueError, match=re.escape("The prompts are list")):
        Prompts.of([[1]], None, None)
