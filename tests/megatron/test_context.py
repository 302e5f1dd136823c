"""Context parallelism under Megatron-LM: ranks share out the tokens of every sequence, without Transformer Engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_integrations.megatron.data import sequences
from accelerate.utils import MegatronLMPlugin
from tests.megatron.training import (
    LENGTH,
    TOKENS,
    Case,
    assert_near,
    check_steps,
    megatron_ranks,
    new_model,
    new_rows,
    plain_training,
    run_with,
    stacked,
    start,
    train,
)

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

STEPS, BATCH = 4, 8
CP2: dict[str, Any] = {"context_parallel_size": 2}
CP4: dict[str, Any] = {"context_parallel_size": 4}
PP2 = {"pp_degree": 2, "num_micro_batches": 2}
TP2 = {"tp_degree": 2}
FULLY = {
    "recompute_activations": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}

ON_TWO: list[Case] = [
    ("Llama", CP2, {}),
    ("GPT2", CP2 | {"num_micro_batches": 2}, {}),
    ("Qwen3", CP2 | {"use_distributed_optimizer": True}, {"tie_word_embeddings": True, "head_dim": 8}),
    ("Llama", CP2 | {"recompute_activations": True, "recompute_granularity": "selective"}, {}),
    ("Llama", CP2 | FULLY, {"max_position_embeddings": LENGTH}),
    ("Mixtral", CP2, MIXTRAL),
    ("Mixtral", CP2 | {"expert_model_parallel_size": 2}, MIXTRAL),
]
ON_FOUR: list[Case] = [
    ("Llama", CP4, {}),
    ("Llama", CP2 | {"use_distributed_optimizer": True}, {}),
    ("GPT2", CP2 | TP2, {}),
    ("Llama", CP2 | TP2 | {"sequence_parallelism": True, "num_micro_batches": 2}, {}),
    ("Llama", CP2 | PP2, {"tie_word_embeddings": True}),
    ("Llama", CP2 | PP2 | {"num_layers_per_virtual_pipeline_stage": 1}, {}),
    ("Mixtral", CP2 | TP2 | {"sequence_parallelism": True, "expert_model_parallel_size": 4}, MIXTRAL),
]


@megatron_ranks(2)
def test_the_same_steps_as_in_one_process(rank: int, world: int) -> None:
    check_steps(world, ON_TWO, STEPS, BATCH)


@megatron_ranks(4)
def test_the_same_steps_on_four_ranks(rank: int, world: int) -> None:
    check_steps(world, ON_FOUR, STEPS, BATCH)


@megatron_ranks(2)
def test_means_of_micro_batches(rank: int, world: int) -> None:
    rows = new_rows(8, masked=True)
    model = new_model()
    parts = [stacked(rows[at : at + 4]) for at in (0, 4)]
    expected = sum(model(**part).loss for part in parts) / 2
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    plugin = MegatronLMPlugin(**CP2, num_micro_batches=2, calculate_per_token_loss=False)
    with run_with(plugin) as accelerator:
        assert_near(train(accelerator, *start(accelerator, new_model(), rows, 4)), [(expected.item(), float(norm))])


@megatron_ranks(2)
def test_evaluation_gives_the_logits_of_whole_sequences(rank: int, world: int) -> None:
    rows = new_rows(6, masked=True)
    batch = stacked(rows)
    for kind in ("GPT2", "Llama"):
        expected = new_model(kind).eval()(**batch)
        with run_with(MegatronLMPlugin(**CP2, return_logits=True)) as accelerator:
            model, loader = accelerator.prepare(new_model(kind).eval(), DataLoader(rows, batch_size=4))
            seen = []
            for one in loader:
                with torch.no_grad():
                    found = model(**one)
                seen.append(accelerator.gather_for_metrics(found.logits))
            assert model(**batch).loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
            del batch["labels"]
            bare = model(**batch)
            batch["labels"] = torch.stack([row["labels"] for row in rows])
        logits = torch.cat(seen)
        assert logits.shape == (6, LENGTH, TOKENS)
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(logits[real], expected.logits.detach()[real], rtol=1e-4, atol=1e-5)
        assert bare.loss is None
        torch.testing.assert_close(bare.logits[real], logits[real])


@megatron_ranks(2)
def test_training_after_an_evaluation_in_inference_mode(rank: int, world: int) -> None:
    rows = new_rows(8)
    expected = plain_training(new_model(), rows, 8)
    sequences._order.cache_clear()
    with run_with(MegatronLMPlugin(**CP2)) as accelerator:
        model, *others = start(accelerator, new_model(), rows, 8)
        with torch.inference_mode():
            model.eval()(input_ids=rows[0]["input_ids"][None])
        found = train(accelerator, model.train(), *others)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


@megatron_ranks(2)
def test_smaller_floats(rank: int, world: int) -> None:
    rows = new_rows(STEPS * BATCH, masked=True)
    expected = plain_training(new_model(), rows, BATCH)
    for precision in ("bf16", "fp16"):
        with run_with(MegatronLMPlugin(**CP2), mixed_precision=precision) as accelerator:
            found = train(accelerator, *start(accelerator, new_model(), rows, BATCH))
        assert_near(found, expected, precision, rel=1e-2)


@megatron_ranks(2)
def test_what_cannot_be_shared_out_is_refused(rank: int, world: int) -> None:
    import transformers

    bert = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4,
        intermediate_size=48, vocab_size=TOKENS))  # fmt: skip
    for words, error, settings, model in (
        (r"only models that predict the next token", ValueError, {}, bert),
        (r"tp_degree=2 x context_parallel_size=2 = 4 does not divide the 2", ValueError, TP2, None),
        (r"custom_loss_function with context_parallel_size=2", NotImplementedError, {"custom_loss_function": max}, None),
        (r"custom_get_batch_function with", NotImplementedError, {"custom_get_batch_function": max}, None),
        (r"custom_train_step_class with", NotImplementedError, {"custom_train_step_class": dict}, None),
        (r"custom_model_provider_function with", NotImplementedError, {"custom_model_provider_function": max}, None),
    ):  # fmt: skip
        with pytest.raises(error, match=words), run_with(MegatronLMPlugin(**CP2, **settings)) as accelerator:
            accelerator.prepare(model)
