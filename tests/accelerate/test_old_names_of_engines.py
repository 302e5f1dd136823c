"""Old paths of quantisation, 8-bit floats and Megatron-LM: what is real works, what needs an absent engine says so."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accelerate.accelerator
from accelerate import Accelerator
from accelerate.commands.launch import CustomHelpFormatter, options_to_group
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.test_utils.scripts import test_script
from accelerate.utils import DDPCommunicationHookType, ao, bnb, dataclasses, megatron_lm, modeling, transformer_engine
from tests.support.ranks import ranks

ARGUMENTS = SimpleNamespace(
    megatron_dataset_flag=False, model_return_dict=False, pretraining_flag=True, num_labels=2, bert_binary_head=True,
    padded_vocab_size=100, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
)  # fmt: skip
ABSENT = "needs megatron.training, which this library does not use"


def test_old_paths_lead_to_the_same_objects() -> None:
    module: Any = accelerate.accelerator
    assert module.convert_model is transformer_engine.convert_model is accelerate.utils.convert_model
    assert module.convert_model_to_fp8_ao is ao.convert_model_to_fp8_ao
    assert module.TERecipeKwargs is dataclasses.TERecipeKwargs
    assert module.fsdp2_prepare_model is accelerate.utils.fsdp2_prepare_model
    assert accelerate.utils.BnbQuantizationConfig is bnb.BnbQuantizationConfig is dataclasses.BnbQuantizationConfig
    assert accelerate.utils.megatron_lm_initialize is megatron_lm.initialize
    assert modeling.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert DDPCommunicationHookType.list() == ["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
    assert Accelerator(cpu=True).mpu is None
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


# ---- Megatron-LM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arguments"), [
    ("initialize", [None]), ("finish_mpu_init", []), ("model_provider_func", []), ("prepare_data_loader", [None, None]),
    ("prepare_model_optimizer_scheduler", [None]), ("prepare_optimizer", [None, None]),
    ("prepare_scheduler", [None, None, None]),
])  # fmt: skip
def test_what_needs_megatron_says_so_in_one_sentence(name: str, arguments: list[Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name}.* {ABSENT}.*Accelerator.prepare"):
        getattr(megatron_lm, name)(*arguments)


def test_stand_ins_keep_what_they_were_given() -> None:
    scheduler = megatron_lm.MegatronLMDummyScheduler("optimizer", total_num_steps=3, decay="cosine")
    assert vars(scheduler) == {
        "optimizer": "optimizer", "total_num_steps": 3, "warmup_num_steps": 0, "kwargs": {"decay": "cosine"},
    }  # fmt: skip
    loader = megatron_lm.MegatronLMDummyDataLoader(data_path="text")
    assert loader.dataset_args == {"data_path": "text", "megatron_dataset_flag": True}
    with pytest.raises(NotImplementedError, match=r"makes its datasets in Accelerator.prepare\(\)"):
        loader.build_train_valid_test_data_iterators(None)


def test_wrappers_leave_stepping_to_megatron() -> None:
    Accelerator(cpu=True)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    inner: Any = torch.optim.SGD([weight], lr=1.0)
    inner.skipped_iter = 1
    optimizer = megatron_lm.MegatronLMOptimizerWrapper(inner)
    assert isinstance(optimizer, AcceleratedOptimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert weight.tolist() == [1.0, 1.0]
    assert weight.grad is not None
    assert optimizer.step_was_skipped
    scheduler = megatron_lm.MegatronLMSchedulerWrapper(torch.optim.lr_scheduler.StepLR(inner, 1), optimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


@pytest.mark.parametrize("name", ["BertTrainStep", "GPTTrainStep", "T5TrainStep"])
def test_train_steps_are_made(name: str) -> None:
    for given in ((None, ARGUMENTS), (ARGUMENTS,)):
        step = getattr(megatron_lm, name)(*given)
        assert isinstance(step, megatron_lm.AbstractTrainStep)
        assert (step.name, step.model_output_class) == (name, None)


def test_methods_of_train_steps_may_take_less() -> None:
    class Own(megatron_lm.GPTTrainStep):
        def get_batch_func(self, megatron_dataset_flag: bool) -> Any:  # type: ignore[override]
            return ("batch", megatron_dataset_flag)

        def get_loss_func(self) -> Any:  # type: ignore[override]
            return "loss"

    step = Own(ARGUMENTS)
    assert (step.get_batch, step.loss_func) == (("batch", False), "loss")

    class Renamed(megatron_lm.BertTrainStep):
        def get_batch_func(self, *given: Any) -> Any:
            return given

        def get_loss_func(self, a: Any, b: Any, c: Any) -> Any:  # type: ignore[override]
            return a, b, c

    renamed = Renamed("accelerator", ARGUMENTS)
    assert (renamed.get_batch, renamed.loss_func) == (("accelerator", False), ("accelerator", True, 2))


def test_train_steps_read_batches_of_transformers() -> None:
    arguments = SimpleNamespace(**vars(ARGUMENTS), eos_token_id=9)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 9, 6, 0]])
    labels = torch.tensor([[1, 2, -100, 4], [5, 9, 6, -100]])
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}

    gpt = megatron_lm.GPTTrainStep(None, arguments)
    read, following, counted, hidden, positions = gpt.get_batch(iter([batch]))
    assert read.tolist() == tokens.tolist()
    assert following.tolist() == [[2, 3, 4, 9], [9, 6, 0, 9]]  # a text ends with the token that ends texts
    assert counted.tolist() == [[1, 0, 1, 1], [1, 0, 0, 1]]  # not: a label of -100; after 9, before padding
    assert hidden[0, 0].tolist() == [[column > row for column in range(4)] for row in range(4)]
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    text = torch.arange(5).view(1, 5)
    read, following, *_ = gpt.get_batch_func(None, True)(iter([{"text": text}]))
    assert (read.tolist(), following.tolist()) == ([[0, 1, 2, 3]], [[1, 2, 3, 4]])

    endless = megatron_lm.GPTTrainStep(None, ARGUMENTS)  # without a token that ends texts
    assert endless.get_batch(iter([batch]))[2].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]

    bert = megatron_lm.BertTrainStep(None, arguments)
    read, types, sentence_order, counted, lm_labels, mask = bert.get_batch(iter([batch]))
    assert (types, sentence_order) == (None, None)
    assert counted.tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert lm_labels is labels
    assert mask.tolist() == batch["attention_mask"].tolist()

    t5 = megatron_lm.T5TrainStep(None, arguments)
    read, before, counted, after, *hidden = t5.get_batch(iter([batch]))
    assert before.tolist() == [[0, 1, 2, 0], [0, 5, 9, 6]]
    assert after.tolist() == [[1, 2, 0, 4], [5, 9, 6, 0]]
    assert [tuple(one.shape) for one in hidden] == [(2, 4, 4), (1, 4, 4), (2, 4, 4)]


def test_losses_count_the_words_that_are_not_masked() -> None:
    step = megatron_lm.GPTTrainStep(None, ARGUMENTS)
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 100.0]]), torch.tensor([[1, 1], [1, 0]])
    loss, shown = step.loss_func(mask, losses)
    assert loss.item() == pytest.approx(7 / 3)
    assert shown["lm loss"].item() == pytest.approx(7 / 3)
    bert = megatron_lm.BertTrainStep(None, ARGUMENTS)
    order, logits = torch.tensor([0, 1]), torch.zeros(2, 2)
    loss, shown = bert.loss_func(mask, order, (losses, logits))
    assert loss.item() == pytest.approx(7 / 3 + 0.6931, abs=1e-3)
    assert set(shown) == {"lm loss", "sop loss"}
    classify = bert.get_loss_func(None, False, 2)
    assert classify(order, logits)[0].item() == pytest.approx(0.6931, abs=1e-3)


def test_masks_are_true_where_nothing_is_seen() -> None:
    words = torch.tensor([[1, 1, 0], [1, 0, 0]])
    steps = megatron_lm.T5TrainStep
    assert steps.attn_mask_postprocess(words)[0].tolist() == [[False, False, True], [False, False, True], [True] * 3]
    assert steps.get_decoder_mask(3, "cpu").tolist() == [
        [[False, True, True], [False, False, True], [False, False, False]]
    ]
    assert steps.get_enc_dec_mask(words, 2, "cpu")[1].tolist() == [[False, True, True]] * 2


@ranks(2)
def test_losses_and_tensors_cross_the_data_parallel_group(rank: int, world: int) -> None:
    means = megatron_lm.avg_losses_across_data_parallel_group([torch.tensor(float(rank)), torch.tensor([2.0])])
    assert means.tolist() == [0.5, 2.0]
    joined = megatron_lm.gather_across_data_parallel_groups({"a": torch.tensor([rank]), "b": torch.tensor(rank)})
    assert {name: value.tolist() for name, value in joined.items()} == {"a": [0, 1], "b": [0, 1]}


# ---- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_help_leaves_out_groups_that_nobody_asked_for(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", *(["--use_fsdp"] if asked else [])])
    parser = argparse.ArgumentParser(formatter_class=CustomHelpFormatter)
    parser.add_argument("--always")
    group = parser.add_argument_group(options_to_group["use_fsdp"], "About sharding.")
    group.add_argument("--fsdp_version")
    shown = parser.format_help().partition("options:")[2]
    assert "--always" in shown
    assert ("--fsdp_version" in shown) is ("About sharding." in shown) is asked


# ---- bundled scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "area"), [
    ("test_ops", "collectives"), ("test_sync", "training"), ("test_distributed_data_loop", "loaders"),
])  # fmt: skip
def test_scripts_run_a_part_of_the_checks(name: str, area: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    rows = getattr(importlib.import_module(f"accelerate.test_utils.scripts.checks.{area}"), area.upper())
    given: list[Any] = []
    monkeypatch.setattr(script, "run_checks", lambda checks: given.extend(checks) or 0)
    assert script.main() == 0
    assert given == list(rows)
    assert set(rows) <= set(test_script.CHECKS)


def test_a_script_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module("accelerate.test_utils.scripts.test_cli")
    assert script.main() == 0
    assert capsys.readouterr().out.startswith("Process 0 of 1 runs on ")
