"""BERT under Megatron-LM: both kinds, three heads, the same losses and gradient norms as one process of plain PyTorch."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.utils import MegatronLMPlugin
from tests.megatron.training import LENGTH, TOKENS, check_run, megatron_ranks, new_rows, optimizer_of, run_with

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

STEPS, BATCH = 5, 8
SIZES = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2,
}  # fmt: skip
TP2, PP2 = {"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}
DP2 = {"num_micro_batches": 2}


def new_bert(kind: str, seed: int = 0, **options: Any) -> Any:
    """A small model, such as "MegatronBertForMaskedLM"."""
    import transformers

    config = getattr(transformers, kind.split("For")[0] + "Config")(**SIZES | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, kind)(config)


def bert_rows(kind: str, count: int, num_labels: int = 2) -> list[dict[str, torch.Tensor]]:
    """Sequences with types; each has another number of tokens, and of masked ones."""
    generator = torch.Generator().manual_seed(5)
    rows = new_rows(count, masked=True)
    for index, row in enumerate(rows):
        row["input_ids"] = row["input_ids"].clamp(min=1) * row["attention_mask"]  # 0 is padding, and only that
        row["token_type_ids"] = (torch.arange(LENGTH) > index % 5).long()
        if kind.endswith("SequenceClassification"):
            one_of = torch.randint(0, num_labels, (), generator=generator)
            row["labels"] = one_of if num_labels > 1 else torch.rand((), generator=generator)
        else:
            row["labels"][1 + index % 3 :: 2] = -100
        if kind.endswith("PreTraining"):
            row["next_sentence_label"] = torch.randint(0, 2, (), generator=generator)
    return rows


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("BertForPreTraining", TP2, {}),
    ("BertForPreTraining", DP2, {}),
    ("BertForMaskedLM", PP2, {}),
    ("BertForSequenceClassification", TP2, {"num_labels": 3}),
    ("BertForSequenceClassification", DP2, {"num_labels": 1}),
    ("MegatronBertForPreTraining", PP2, {}),
    ("MegatronBertForMaskedLM", TP2 | {"num_micro_batches": 2}, {"hidden_act": "gelu_new"}),
    ("MegatronBertForSequenceClassification", PP2, {"num_labels": 2}),
]


@megatron_ranks(2)
def test_the_same_steps_as_in_one_process(rank: int, world: int) -> None:
    for kind, layout, options in CASES:
        rows = bert_rows(kind, STEPS * BATCH, options.get("num_labels", 2))
        check_run(world, partial(new_bert, kind, **options), layout, rows, BATCH)


@megatron_ranks(2)
def test_weights_come_back_and_logits_are_those_of_the_model(rank: int, world: int) -> None:
    for kind, layout, options in CASES:
        original = new_bert(kind, **options)
        plain = new_bert(kind, attn_implementation="eager", **options).eval()
        expected = {name: value.clone() for name, value in original.state_dict().items()}
        rows = bert_rows(kind, 7, options.get("num_labels", 2))
        with run_with(MegatronLMPlugin(return_logits=True, **layout)) as accelerator:
            model, loader = accelerator.prepare(original, DataLoader(rows, batch_size=7))
            found = accelerator.get_state_dict(model)
            assert list(found) == list(expected), kind
            assert all(torch.equal(found[name], value) for name, value in expected.items()), kind
            model.eval()
            batch = next(iter(DataLoader(rows, batch_size=7)))  # type: ignore[arg-type]
            ours, theirs = model(**batch), plain(**batch)
            assert set(ours) == set(theirs)
            assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5), kind
            for name in set(theirs) - {"loss"}:
                counted = batch["attention_mask"].bool() if theirs[name].ndim == 3 else slice(None)
                torch.testing.assert_close(ours[name][counted], theirs[name][counted], rtol=1e-4, atol=1e-5)
            without = {name: value for name, value in batch.items() if "label" not in name}
            alone = model(**without)
            assert alone.loss is None
            assert set(alone) == set(theirs) - {"loss"}


@megatron_ranks(2)
def test_what_bert_cannot_do_is_refused(rank: int, world: int) -> None:
    for words, model, layout in (
        (r"sequence_parallelism cannot be combined with BERT", new_bert("BertForMaskedLM"), TP2 | {"sequence_parallelism": True}),
        (r"is_decoder=True", new_bert("BertForMaskedLM", is_decoder=True), {}),
        (r"tie_word_embeddings=False", new_bert("BertForPreTraining", tie_word_embeddings=False), {}),
        (r"custom_get_batch_function is for models that predict the next token", new_bert("BertForMaskedLM"), {"custom_get_batch_function": next}),
    ):  # fmt: skip
        with (
            pytest.raises(ValueError, match=words),
            run_with(MegatronLMPlugin(**layout)) as accelerator,
        ):
            accelerator.prepare(model)
    with run_with(MegatronLMPlugin()) as accelerator:
        model = new_bert("BertForPreTraining")
        model, _ = accelerator.prepare(model, optimizer_of(model))
        batch = next(iter(DataLoader(bert_rows("BertForPreTraining", 2), 2)))  # type: ignore[arg-type]
        del batch["next_sentence_label"]
        with pytest.raises(ValueError, match="without 'next_sentence_label'"):
            model(**batch)
        with pytest.raises(ValueError, match=r"next_sentence_label has the shape \(3,\).*per sample"):
            model(**batch, next_sentence_label=torch.zeros(3).long())
        with pytest.raises(NotImplementedError, match=r"generate\(\) is for models that predict the next token"):
            model.generate(batch["input_ids"])
