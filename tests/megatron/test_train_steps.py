"""The classes of training steps that accelerate 1.15 has, and programs that derive from them, under Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from accelerate.utils import (
    BertTrainStep,
    GPTTrainStep,
    MegatronLMPlugin,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
)
from tests.megatron.test_bert import bert_rows, new_bert
from tests.megatron.test_t5 import new_t5, t5_rows
from tests.megatron.training import megatron_ranks, new_model, new_rows, optimizer_of, run_with, stacked

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

SAMPLES, MICRO_BATCHES = 8, 2
END = 7  # the token that ends a text


class WeighedStep(GPTTrainStep):
    """Samples count more, the more of some tokens they have; it takes Megatron's arguments alone, and so do its methods."""

    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Callable[..., Any]:  # type: ignore[override]
        def loss_func(inputs: torch.Tensor, loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
            weights = 1 + self.kwargs["alpha"] * sum((inputs == token).sum(1) for token in self.kwargs["tokens"])
            loss = ((output.float() * loss_mask).sum(1) / loss_mask.sum(1) * weights).mean()
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(batches: Iterator[Any], model: Any) -> Any:
            tokens, labels, loss_mask, hidden, positions = self.get_batch(batches)  # type: ignore[misc]
            return model(tokens, positions, hidden, labels=labels), partial(self.loss_func, tokens, loss_mask)  # type: ignore[arg-type]

        return forward_step


def token_losses(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (samples, tokens) as a text that goes on with END has them, and which of them count."""
    tokens = batch["input_ids"]
    following = F.pad(tokens[:, 1:], (0, 1), value=END)
    logits = model(input_ids=tokens).logits
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(tokens)
    return losses, (tokens != END).float()


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses, counted = token_losses(model, batch)
    weights = 1 + 0.5 * sum((batch["input_ids"] == token).sum(1) for token in (3, 4))
    return ((losses * counted).sum(1) / counted.sum(1) * weights).mean()


def text_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses, counted = token_losses(model, batch)
    return (losses * counted).sum() / counted.sum()


def plain_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def new_gpt() -> Any:
    return new_model(eos_token_id=END)


def real_t5_rows() -> list[dict[str, torch.Tensor]]:
    return [{**row, "attention_mask": torch.ones_like(row["attention_mask"])} for row in t5_rows(SAMPLES)]


TP2, PP2, DP2 = {"tp_degree": 2}, {"pp_degree": 2}, dict[str, int]()
WEIGHED = {"custom_train_step_class": WeighedStep, "custom_train_step_kwargs": {"alpha": 0.5, "tokens": [3, 4]}}
CASES: list[tuple[str, dict[str, Any], Any, Any, Any, tuple[dict[str, int], ...]]] = [
    ("own", WEIGHED, new_gpt, lambda: new_rows(SAMPLES), own_loss, (TP2, PP2, DP2)),
    ("GPT", {"custom_train_step_class": GPTTrainStep}, new_gpt, lambda: new_rows(SAMPLES), text_loss, (TP2, PP2, DP2)),
    (
        "BERT",
        {"custom_train_step_class": BertTrainStep},
        partial(new_bert, "MegatronBertForMaskedLM"),
        partial(bert_rows, "MegatronBertForMaskedLM", SAMPLES),
        plain_loss,
        (TP2, PP2),
    ),
    (
        "BERT of sentences",
        {"custom_train_step_class": BertTrainStep},
        partial(new_bert, "BertForPreTraining"),
        partial(bert_rows, "BertForPreTraining", SAMPLES),
        plain_loss,
        (TP2,),
    ),
    (
        "BERT of classes",
        {"custom_train_step_class": BertTrainStep},
        partial(new_bert, "BertForSequenceClassification"),
        partial(bert_rows, "BertForSequenceClassification", SAMPLES),
        plain_loss,
        (TP2, DP2),
    ),
    ("T5", {"custom_train_step_class": T5TrainStep}, new_t5, real_t5_rows, plain_loss, (TP2, DP2)),
]


@megatron_ranks(2)
def test_steps_as_accelerate_has_them(rank: int, world: int) -> None:
    for name, hooks, new, make_rows, loss_of, layouts in CASES:
        batch = stacked(make_rows())
        for layout in layouts:
            replicas = 1 if layout else world
            parts = [
                {key: value.chunk(replicas * MICRO_BATCHES)[number] for key, value in batch.items()}
                for number in range(replicas * MICRO_BATCHES)
            ]
            plain = new()
            expected = torch.stack([loss_of(plain, part) for part in parts]).mean()
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
            with run_with(MegatronLMPlugin(num_micro_batches=MICRO_BATCHES, **hooks, **layout)) as accelerator:
                model = new()
                model, _ = accelerator.prepare(model, optimizer_of(model))
                shard = accelerator.engine.data_shard()
                output = model(**{key: value.chunk(shard.count)[shard.index] for key, value in batch.items()})
                found = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))  # type: ignore[arg-type]
                assert (output.loss.item(), found) == pytest.approx((expected.item(), norm), rel=1e-5), (name, layout)
                assert isinstance(model.train_step_handler, hooks["custom_train_step_class"])
                assert type(output).__name__.startswith(("CausalLM", "Sequence", "Seq2Seq"))


@megatron_ranks(2)
def test_what_a_step_is_told_of_the_run(rank: int, world: int) -> None:
    told: list[Any] = []

    class Asking(GPTTrainStep):
        def __init__(self, args: Any) -> None:
            super().__init__(None, args)
            told.append(args)

    for kind, options in (("Llama", {}), ("Qwen2", {"eos_token_id": [5, 6]})):  # 1.15 knows the first family only
        plugin = MegatronLMPlugin(
            tp_degree=2, custom_train_step_class=Asking, other_megatron_args={"layernorm_epsilon": 1e-3}
        )
        with run_with(plugin) as accelerator:
            model = new_model(kind, **options)
            accelerator.prepare(model, optimizer_of(model))
            args = told.pop()
        sizes = (args.hidden_size, args.num_layers, args.num_attention_heads, args.max_position_embeddings)
        assert sizes == (32, 4, 4, 32)
        assert (args.orig_vocab_size, args.padded_vocab_size, args.tensor_model_parallel_size) == (61, 62, 2)
        assert args.eos_token_id == (5 if options else 2)
        assert (args.layernorm_epsilon, args.rank, args.world_size, args.data_parallel_size) == (1e-3, rank, 2, 1)
