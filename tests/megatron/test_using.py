"""What programs do with Megatron-LM: evaluation, metrics, the launcher, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_integrations.megatron.data.batches import Limits, make_batch
from accel_integrations.megatron.data.tasks import Causal
from accelerate.utils import MegatronEngine, MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin
from tests.megatron.training import LENGTH, TOKENS, megatron_ranks, new_model, new_rows, optimizer_of, run_with

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
ROOT = Path(__file__).resolve().parents[2]


@megatron_ranks(2)
def test_evaluation_gives_the_logits_of_each_sample_once(rank: int, world: int) -> None:
    rows = new_rows(11, masked=True)
    plain = new_model(attn_implementation="eager").eval()
    for layout in (
        {"num_micro_batches": 2},
        {"tp_degree": 2, "num_micro_batches": 2},
        {"pp_degree": 2, "num_micro_batches": 2},
    ):
        with run_with(MegatronLMPlugin(return_logits=True, **layout)) as accelerator:
            model, loader = accelerator.prepare(new_model(), DataLoader(rows, batch_size=2))
            assert isinstance(model, MegatronEngine)
            model.eval()
            found, seen = [], 0
            for batch in loader:
                output = model(**batch)
                assert output.logits.shape == (*batch["input_ids"].shape, TOKENS)
                logits, tokens = accelerator.gather_for_metrics((output.logits, batch["input_ids"]))
                found.append(logits)
                assert all(torch.equal(one, rows[seen + index]["input_ids"]) for index, one in enumerate(tokens))
                seen += len(tokens)
            assert seen == len(rows), layout
            expected = torch.cat([plain(**batch).logits for batch in DataLoader(rows, batch_size=11)]).detach()  # type: ignore[arg-type]
            counted = torch.stack([row["attention_mask"] for row in rows]).bool()
            torch.testing.assert_close(torch.cat(found)[counted], expected[counted], rtol=1e-4, atol=1e-5)
            odd = {name: torch.stack([row[name] for row in rows[:3]]) for name in rows[0]}
            assert model(**odd).loss.item() == pytest.approx(plain(**odd).loss.item(), rel=1e-5)


@megatron_ranks(2)
def test_what_cannot_be_trained_is_refused_before_anything_is_built(rank: int, world: int) -> None:
    def prepare(layout: dict[str, Any], model: Any, *others: Any, **settings: Any) -> None:
        with run_with(MegatronLMPlugin(**layout), **settings) as accelerator:
            accelerator.prepare(model, *others)

    tp2, pp2 = {"tp_degree": 2}, {"pp_degree": 2}
    for error, words, layout, sizes in (
        (ValueError, r"tp_degree=4 does not divide the 2 processes", {"tp_degree": 4}, {}),
        (ValueError, r"tp_degree=2 does not divide the model's 3 attention heads", tp2,
         {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
        (ValueError, r"tp_degree=2 does not divide the model's 1 heads of keys", tp2, {"num_key_value_heads": 1}),
        (ValueError, r"pp_degree=2 does not divide the model's 3 layers", pp2, {"num_hidden_layers": 3}),
        (ValueError, r"num_layers_per_virtual_pipeline_stage=3 .* does not divide", pp2 | {"num_layers_per_virtual_pipeline_stage": 3}, {}),
        (ValueError, r"num_micro_batches=3 must be a multiple of pp_degree=2",
         pp2 | {"num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 3}, {}),
        (ValueError, r"rope_type 'default'", {}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        (ValueError, r"context_parallel_size=3 does not divide the", {"context_parallel_size": 3}, {}),
        (ValueError, r"expert_tensor_parallel_size=2, but the model has no experts", {"expert_tensor_parallel_size": 2}, {}),
        (NotImplementedError, r"use_custom_fsdp=True is not supported", {"use_custom_fsdp": True}, {}),
        (ValueError, r"has 'num_heads', which megatron-core", {"other_megatron_args": {"num_heads": 2}}, {}),
        (ValueError, r"has tensor_model_parallel_size=2, but that follows from the degrees of MegatronLMPlugin",
         {"other_megatron_args": {"num_layers": 4, "tensor_model_parallel_size": 2}}, {}),
        (ValueError, r"has fp8='hybrid', but that follows from the layers", {"other_megatron_args": {"fp8": "hybrid"}}, {}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            prepare(layout, new_model(**sizes))

    class Strange(torch.nn.Linear):
        config = type("Config", (), {"model_type": "bert"})

    with pytest.raises(ValueError, match=r"Strange with model_type='bert'.*gpt2 \(GPT2LMHeadModel\), llama"):
        prepare({}, Strange(2, 2))
    with pytest.raises(ValueError, match=r"2 models \(LlamaForCausalLM, LlamaForCausalLM\).*a program of its own"):
        prepare({}, new_model(), new_model())
    with run_with(MegatronLMPlugin()) as accelerator:
        accelerator.prepare(new_model())
        for again in (lambda: accelerator.prepare(new_model()), lambda: accelerator.prepare_model(new_model())):
            with pytest.raises(ValueError, match=r"a second model \(LlamaForCausalLM\)"):
                again()
    model = new_model()
    with pytest.raises(ValueError, match="do not belong to the model"):
        prepare({}, model, optimizer_of(new_model()))
    dummy = MegatronLMDummyDataLoader(data_path="x", micro_batch_size=1, seq_length=4)
    with pytest.raises(FileNotFoundError, match=r"There is no x\.bin"):
        prepare({"train_iters": 1}, model, dummy)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*num_micro_batches"):
        prepare({}, model, gradient_accumulation_steps=2)
    with (
        run_with(MegatronLMPlugin()) as accelerator,
        pytest.raises(NotImplementedError, match=r"'fp8'.*'bf16', 'fp16'"),
    ):
        accelerator.engine.make_precision("fp8")  # refused earlier where torchao is missing
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_positions_on_an_accelerator_are_looked_into_once_per_shape() -> None:
    limits = Limits(Causal(), 32, None, learns_positions=False, multiple=1, num_micro_batches=1)
    assert limits.is_new((2, 8))
    assert not limits.is_new((2, 8))
    assert limits.is_new((2, 9))
    wrong = {name: torch.ones(2, 8).long() for name in ("input_ids", "labels", "position_ids")}
    for _ in range(2):  # in CPU memory each time
        with pytest.raises(ValueError, match="position_ids are not 0, 1, 2"):
            make_batch(wrong, limits, torch.device("cpu"), training=True)


@megatron_ranks(2)
def test_batches_that_cannot_be_used_are_refused(rank: int, world: int) -> None:
    rows = new_rows(8)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with run_with(MegatronLMPlugin(tp_degree=2, num_micro_batches=3)) as accelerator:
        model = new_model("Mistral", sliding_window=12)
        model, _ = accelerator.prepare(model, optimizer_of(model))
        tokens = batch["input_ids"]
        for words, values in (
            ("num_micro_batches=3 does not divide the 8 samples", batch),
            ("without 'labels'", {"input_ids": tokens}),
            ("'token_type_ids', which Megatron-LM cannot use", batch | {"token_type_ids": tokens}),
            ("labels has the shape", batch | {"labels": tokens[:, :-1]}),
            ("33 tokens per sample, and the model takes 32", {"input_ids": torch.zeros(3, 33).long(), "labels": torch.zeros(3, 33).long()}),
            ("sliding window of 12", {"input_ids": torch.zeros(3, 20).long(), "labels": torch.zeros(3, 20).long()}),
            ("position_ids are not 0, 1, 2", {name: one[:3] for name, one in batch.items()} | {"position_ids": torch.ones(3, LENGTH).long()}),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                model(**values)
        assert model.iteration == 0


@megatron_ranks(2)
def test_a_dummy_scheduler_decays_as_the_plugin_says(rank: int, world: int) -> None:
    plugin = MegatronLMPlugin(tp_degree=2, lr_decay_style="linear")
    with run_with(plugin, mixed_precision="bf16") as accelerator:
        model = new_model()
        optimizer = optimizer_of(model)
        dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(new_rows(16), 4), dummy)
        assert (plugin.micro_batch_size, plugin.global_batch_size, plugin.data_parallel_size) == (4, 4, 1)
        rates, losses = [scheduler.get_last_lr()[0]], []
        for batch in loader:
            losses.append(model(**batch).loss.item())
            rates.append(scheduler.get_last_lr()[0])
        assert rates == pytest.approx([0.0, 0.005, 0.01, 0.01 * 7 / 8, 0.01 * 6 / 8])
        assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
        assert {one.dtype for one in accelerator.get_state_dict(model).values()} == {torch.float32}
        assert all(loss == pytest.approx(5.0, abs=1.0) for loss in losses)


def launched(script: Path, *options: str) -> str:
    """What a script prints that two processes run."""
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", "--use_megatron_lm"]
    ended = subprocess.run([*command, *options, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.launch
def test_stages_read_the_same_shuffled_batches() -> None:
    """Stages have drawn different amounts of random numbers when they begin to read."""
    options = ["--megatron_lm_pp_degree", "2", "--megatron_lm_num_micro_batches", "4"]
    said = launched(ROOT / "examples" / "by_feature" / "megatron_lm_gpt_pretraining.py", *options)
    assert float(said.split()[-1]) < 0.5, said


@pytest.mark.launch
def test_the_example_runs_under_the_launcher() -> None:
    options = ["--megatron_lm_tp_degree", "2", "--megatron_lm_num_micro_batches", "2"]
    said = launched(ROOT / "docs" / "examples" / "megatron_lm.py", *options)
    found = re.search(r"loss (\S+) -> (\S+), (\d+)%", said)
    assert found is not None, said
    assert float(found[2]) < 0.5 * float(found[1])
    assert int(found[3]) > 80
