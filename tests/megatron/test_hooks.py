"""Functions and classes of a program that replace parts of a step under Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate.utils.megatron_lm import AbstractTrainStep
from tests.megatron.training import TOKENS, megatron_ranks, new_batch, new_model, new_rows, optimizer_of, run_with

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]


def squared_losses(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.square() * loss_mask).sum() / loss_mask.sum()
    return loss, {"squared": loss.detach()}


@megatron_ranks(2)
def test_a_program_may_compute_another_loss(rank: int, world: int) -> None:
    batch, plain = new_batch(8), new_model()
    logits = plain(input_ids=batch["input_ids"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
    )
    expected = losses.square().mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    for layout in ({"tp_degree": 2}, {"pp_degree": 2}, {}):
        plugin = MegatronLMPlugin(num_micro_batches=2, custom_loss_function=squared_losses, **layout)
        with run_with(plugin) as accelerator:
            model = new_model()
            model, _ = accelerator.prepare(model, optimizer_of(model))
            shard = accelerator.engine.data_shard()
            loss = model(**{name: value.chunk(shard.count)[shard.index] for name, value in batch.items()}).loss
            found = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))  # type: ignore[arg-type]
            assert (loss.item(), found) == pytest.approx((expected.item(), norm), rel=1e-5), layout


def shifted_batch(batches: Iterator[Any]) -> tuple[torch.Tensor, ...]:
    """As a program for Megatron-LM has it: one more token, and everything by position."""
    batch = next(batches)
    longer = torch.nn.functional.pad(batch["input_ids"], (0, 1))
    tokens, labels = longer[:, :-1], longer[:, 1:]
    counted = torch.nn.functional.pad(batch["attention_mask"][:, 1:], (0, 1)).float()
    hidden = (
        torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1).expand(len(tokens), -1, -1, -1)
    )
    return tokens, labels, counted, hidden, torch.arange(tokens.shape[1]).expand_as(tokens)


class OwnStep(AbstractTrainStep):
    """Reads batches and computes the loss itself: the mean over tokens of a micro-batch, `factor` times."""

    def __init__(self, factor: float) -> None:
        super().__init__("OwnStep")
        self.factor = factor
        self.forward_step = self.step

    def step(self, batches: Iterator[Any], model: Any) -> Any:
        tokens, labels, counted, hidden, positions = shifted_batch(batches)
        losses = model(tokens, positions, hidden, labels=labels)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found = self.factor * (losses * counted).sum() / counted.sum()
            return found, {"lm loss": found}

        return losses, loss


def provide(pre_process: bool, post_process: bool, config: Any) -> Any:
    """A chunk as megatron-core builds it for Llama."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    PROVIDED.append((pre_process, post_process))
    rows = TOKENS + TOKENS % config.tensor_model_parallel_size
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=rows, max_sequence_length=32,
        pre_process=pre_process, post_process=post_process, position_embedding_type="rope",
    )  # fmt: skip


PROVIDED: list[tuple[bool, bool]] = []


@megatron_ranks(2)
def test_a_program_may_replace_parts_of_the_step(rank: int, world: int) -> None:
    batch, plain = new_batch(8), new_model()
    expected = plain(**batch).loss
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    own_step = {"custom_train_step_class": OwnStep, "custom_train_step_kwargs": {"factor": 2.0}}
    for hooks, factor in (
        ({"custom_get_batch_function": shifted_batch}, 1.0),
        (own_step, 2.0),
        ({"custom_model_provider_function": provide}, 1.0),
    ):
        for layout in ({"tp_degree": 2}, {"pp_degree": 2}, {}):
            PROVIDED.clear()
            with run_with(MegatronLMPlugin(num_micro_batches=2, **layout, **hooks)) as accelerator:  # type: ignore[arg-type]
                model = new_model()
                model, _ = accelerator.prepare(model, optimizer_of(model))
                shard = accelerator.engine.data_shard()
                own = {name: value.chunk(shard.count)[shard.index] for name, value in batch.items()}
                loss = model(**own).loss
                found = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))  # type: ignore[arg-type]
                assert (loss.item(), found) == pytest.approx((factor * expected.item(), factor * norm), rel=1e-5), (
                    hooks,
                    layout,
                )
                handler = model.train_step_handler
                assert isinstance(handler, OwnStep) == (hooks is own_step)
                is_end = rank == world - 1
                ends = (rank == 0, is_end) if layout.get("pp_degree") else (True, True)
                assert ([ends] if "custom_model_provider_function" in hooks else []) == PROVIDED
                model.eval()
                assert model(**own).loss.item() < 1.1 * loss.item()


def wrapped_twice(provider: Any) -> Any:
    """Builds and wraps the chunk as a program for Megatron-LM does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, hidden_dropout=0.0,
        attention_dropout=0.0, normalization="RMSNorm", layernorm_epsilon=1e-6, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=2, masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False,
    )  # fmt: skip
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config=config, ddp_config=settings, module=provider(True, True, config=config))]


@megatron_ranks(2)
def test_a_program_may_build_and_wrap_the_model(rank: int, world: int) -> None:
    batch = new_batch(8)
    expected = new_model()(**batch).loss.item()
    hooks = {"custom_model_provider_function": provide, "custom_prepare_model_function": wrapped_twice}
    with run_with(MegatronLMPlugin(tp_degree=2, **hooks)) as accelerator:  # type: ignore[arg-type]
        original = new_model()
        kept = {name: value.clone() for name, value in original.state_dict().items()}
        model, _ = accelerator.prepare(original, optimizer_of(original))
        assert all(torch.equal(value, kept[name]) for name, value in accelerator.get_state_dict(model).items())
        assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
        assert model(**batch).loss.item() < expected


@megatron_ranks(2)
def test_hooks_that_cannot_be_used_are_refused(rank: int, world: int) -> None:
    class NoStep(AbstractTrainStep):
        def __init__(self) -> None:
            super().__init__("NoStep")

    for error, words, hooks in (
        (ValueError, "custom_train_step_kwargs=.* has no effect without", {"custom_train_step_kwargs": {"a": 1}}),
        (TypeError, "custom_train_step_class=NoStep .* forward_step is None", {"custom_train_step_class": NoStep}),
        (ValueError, "custom_loss_function has no effect with custom_train_step_class",
         {"custom_train_step_class": OwnStep, "custom_train_step_kwargs": {"factor": 1.0}, "custom_loss_function": squared_losses}),
        (ValueError, "custom_prepare_model_function needs custom_model_provider_function", {"custom_prepare_model_function": wrapped_twice}),
        (TypeError, "custom_prepare_model_function returned str", {"custom_prepare_model_function": lambda provider: "x", "custom_model_provider_function": provide}),
        (RuntimeError, "no weight of the model maps to", {"custom_model_provider_function": provide_other}),
    ):  # fmt: skip
        model = new_model()
        with pytest.raises(error, match=words), run_with(MegatronLMPlugin(**hooks)) as accelerator:  # type: ignore[arg-type]
            accelerator.prepare(model)
        assert all(not parameter.is_meta for parameter in model.parameters())
    with run_with(MegatronLMPlugin(custom_get_batch_function=next)) as accelerator:
        model = new_model()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        with pytest.raises(ValueError, match=r"custom_get_batch_function returned 3 values. Return tokens, labels"):
            model(**new_batch(2))


def provide_other(pre_process: bool, post_process: bool, config: Any) -> Any:
    """A chunk with a parameter that Llama has not."""
    made = provide(pre_process, post_process, config)
    made.extra = torch.nn.Parameter(torch.zeros(1))
    return made


ASKED: list[list[int]] = []


def provide_datasets(counts: list[int]) -> Any:
    """Three datasets, of a name that only the program's own reader of batches knows."""
    ASKED.append(counts)
    return [[{"text": row["input_ids"]} for row in new_rows(count)] for count in (16, 8, 9)]


def read_text(batches: Iterator[Any]) -> tuple[torch.Tensor, ...]:
    """What `shifted_batch` makes of it."""
    text = next(batches)["text"]
    return shifted_batch(iter([{"input_ids": text, "attention_mask": torch.ones_like(text)}]))


@megatron_ranks(2)
def test_datasets_of_a_program_are_read(rank: int, world: int) -> None:
    hooks = {"custom_megatron_datasets_provider_function": provide_datasets, "custom_get_batch_function": read_text}
    plugin = MegatronLMPlugin(num_micro_batches=2, eval_iters=3, eval_interval=5, **hooks)  # type: ignore[arg-type]
    dummy = MegatronLMDummyDataLoader(micro_batch_size=2)
    batch = torch.stack([row["input_ids"] for row in new_rows(8)])
    expected = new_model()(input_ids=batch, labels=batch).loss.item()
    with run_with(plugin) as accelerator:
        model = new_model()
        optimizer = optimizer_of(model)
        scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=20)
        ASKED.clear()
        model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, dummy, dummy, dummy)
        assert ASKED == [[10 * 8, 3 * 3 * 8, 3 * 8]]
        assert [len(loader) for loader in loaders] == [2, 1, 1]
        assert plugin.global_batch_size == 8
        losses = [model(**batch).loss.item() for batch in loaders[0]]
        assert losses[0] == pytest.approx(expected, rel=1e-5)
    for words, kind, kwargs, size in (
        ("micro_batch_size=None", ValueError, hooks | {"train_iters": 1}, {}),
        ("Set train_iters of MegatronLMPlugin", ValueError, hooks, {"micro_batch_size": 2}),
        ("seq_length=None", ValueError, {"train_iters": 1}, {"micro_batch_size": 2}),
    ):
        with pytest.raises(kind, match=words), run_with(MegatronLMPlugin(**kwargs)) as accelerator:  # type: ignore[arg-type]
            accelerator.prepare(new_model(), MegatronLMDummyDataLoader(**size))
    with (
        pytest.raises(ValueError, match="returned 3 datasets for 4"),
        run_with(MegatronLMPlugin(train_iters=1, **hooks)) as accelerator,  # type: ignore[arg-type]
    ):
        accelerator.prepare(new_model(), dummy, dummy, dummy, dummy)
