"""Models of transformers with sharded sequences: their local attention, masks and windows, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.mesh import ParallelismConfig
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.clients import tiny
from tests.support.ranks import ranks

transformers = pytest.importorskip("transformers", minversion="5.20")

from tools import long_sequences as cases  # noqa: E402

REFUSED = ("Falcon, ALiBi", "Jamba")


def sequence_parallel(size: int = 2, **sizes: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    config = ParallelismConfig(sp_size=size, **sizes)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    assert config.sp_backend == "torch", "left out, without DeepSpeed"
    return accelerator


@pytest.mark.sample(6)
@ranks(2)
@pytest.mark.parametrize("family", [name for name in cases.FAMILIES if name not in REFUSED])
def test_gradients_are_those_of_one_process(rank: int, world: int, family: str) -> None:
    accelerator = sequence_parallel()
    for attention in cases.attentions_of(family):
        for kind in cases.KINDS:
            assert cases.difference(accelerator, family, attention, kind) < cases.MOST["sp"], (attention, kind)


def by_positions(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention that tells packed samples apart by their positions, without a mask, as flash attention does."""
    assert mask is None
    samples = (options["position_ids"] == 0).cumsum(1)
    same = samples[:, None, :, None] == samples[:, None, None, :]
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, same.tril(), scale=options["scaling"])
    return output.transpose(1, 2), None


@ranks(2)
def test_an_attention_function_of_the_program_gets_full_positions(rank: int, world: int) -> None:
    transformers.AttentionInterface.register("by_positions", by_positions)
    batch, labels = cases.inputs_of("packed")
    mean, gradients = expected_gradients("packed")
    accelerator = sequence_parallel()
    model = accelerator.prepare(cases.build("Llama", "by_positions"))
    local = {name: tensor.chunk(2, dim=1)[rank] for name, tensor in batch.items()}
    num_tokens = int((labels != cases.IGNORED).sum())
    accelerator.backward(2 * cases.loss_of(model, local, labels.chunk(2, dim=1)[rank], num_tokens))
    for name, weight in accelerator.unwrap_model(model).named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=name)


@ranks(4)
def test_four_ranks_and_key_heads_that_they_share(rank: int, world: int) -> None:
    accelerator = sequence_parallel(4)
    for family in ("Llama, 1 key head", "gpt-oss, window 4, sinks"):
        for kind in cases.KINDS:
            assert cases.difference(accelerator, family, "eager", kind) < cases.MOST["sp"], (family, kind)


# ---- loops ----------------------------------------------------------------------------------------------------------


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    """The batch as a dataset, with labels that are not shifted."""
    batch, labels = cases.inputs_of(kind)
    unshifted = torch.cat([torch.full((cases.BATCH, 1), cases.IGNORED), labels[:, :-1]], dim=1)
    batch["labels"] = unshifted
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(cases.BATCH)]


def expected_gradients(kind: str, family: str = "Llama") -> tuple[float, dict[str, torch.Tensor]]:
    batch, labels = cases.inputs_of(kind)
    model = cases.build(family, "sdpa")
    loss = cases.loss_of(model, batch, labels, int((labels != cases.IGNORED).sum()))
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def assert_expected(accelerator: Accelerator, model: Any, loss: torch.Tensor, kind: str) -> None:
    mean, gradients = expected_gradients(kind)
    assert loss.item() == pytest.approx(mean, abs=1e-5)
    for name, weight in accelerator.unwrap_model(model).named_parameters():
        full = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        torch.testing.assert_close(full, gradients[name], atol=1e-6, rtol=1e-4, msg=name)


def loss_of_model(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's local loss, as the mean over the tokens of all ranks."""
    num_tokens = (batch["shift_labels"] != cases.IGNORED).sum()
    return accelerator.mean_over_tokens(model(**batch).loss, num_tokens)


@ranks(2)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_batches_are_sharded_once_whoever_shards_them(rank: int, world: int, kind: str) -> None:
    """By a prepared loader, by one in a block of the program, and by the block alone."""
    accelerator = sequence_parallel()
    plain = torch.utils.data.DataLoader(samples(kind), batch_size=cases.BATCH)

    model, loader = accelerator.prepare(cases.build("Llama", "sdpa"), plain)
    for batch in loader:
        assert batch["input_ids"].shape == (cases.BATCH, cases.LENGTH // 2)
        loss = loss_of_model(accelerator, model, batch)
        accelerator.backward(loss)
    assert_expected(accelerator, model, loss, kind)

    model = accelerator.prepare(cases.build("Llama", "sdpa"))
    for batch in loader:
        buffers = [batch["input_ids"], batch["shift_labels"], batch["position_ids"]]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
            loss = loss_of_model(accelerator, model, batch)
            accelerator.backward(loss)
    assert_expected(accelerator, model, loss, kind)

    model = accelerator.prepare(cases.build("Llama", "sdpa"))
    for batch in plain:
        batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=cases.IGNORED)
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers)):
            loss = loss_of_model(accelerator, model, batch)
            accelerator.backward(loss)
        assert batch["input_ids"].shape == (cases.BATCH, cases.LENGTH), "restored"
    assert_expected(accelerator, model, loss, kind)


@ranks(4)
@pytest.mark.parametrize("recomputes", [False, True])
def test_with_sharded_weights(rank: int, world: int, recomputes: bool) -> None:
    accelerator = sequence_parallel(dp_shard_size=2)
    model = cases.build("Llama", "sdpa")
    if recomputes:
        model.gradient_checkpointing_enable()
    loader = torch.utils.data.DataLoader(samples("packed"), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    for batch in loader:
        loss = loss_of_model(accelerator, model, batch)
        accelerator.backward(loss)
    weight = accelerator.unwrap_model(model).lm_head.weight
    assert weight.to_local().shape[0] * 4 == weight.shape[0], "over both dimensions"
    assert_expected(accelerator, model, loss, "packed")


@ranks(2)
def test_adapters_and_bfloat16(rank: int, world: int) -> None:
    peft = pytest.importorskip("peft")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=ParallelismConfig(sp_size=2))
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(cases.build("Mistral, window 4", "sdpa"), lora)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(samples("left padding"), batch_size=2))
    for batch in loader:
        accelerator.backward(loss_of_model(accelerator, model, batch))
    plain = peft.get_peft_model(cases.build("Mistral, window 4", "sdpa"), lora)
    plain.load_state_dict(state)
    batch, labels = cases.inputs_of("left padding")
    with torch.autocast("cpu", torch.bfloat16):
        plain(**batch, labels=labels, shift_labels=labels).loss.backward()
    for local, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(local.grad, expected.grad, atol=2e-3, rtol=0.05)


ROWS = [
    torch.arange(start, start + length).remainder(29).add(3).tolist()
    for start, length in ((0, 9), (5, 7), (2, 6), (9, 10))
]


@ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_trainers_take_the_steps_of_one_process(rank: int, world: int, tmp_path: Path) -> None:
    """`SFTTrainer` packs the samples, which attend to themselves alone."""
    pytest.importorskip("trl")
    expected = steps_of_a_loop()
    for make in (make_trainer, make_packing_trainer):
        trainer = make(tmp_path, ParallelismConfig(sp_size=2))
        trainer.train()
        steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        assert trainer.state.global_step == len(expected)


def steps_of_a_loop() -> list[tuple[float, float]]:
    """Losses and gradient norms of one process that pads its samples at their end."""
    model = cases.build("Llama", "sdpa")
    batch = padded([{"input_ids": row} for row in ROWS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    steps = []
    for _ in range(4):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    tokens = torch.tensor([row + [0] * (16 - len(row)) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens > 0).long(),
        "labels": tokens.where(tokens > 0, cases.IGNORED),
    }


def settings(folder: Path, config: ParallelismConfig) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": len(ROWS),
        "num_train_epochs": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "parallelism_config": config,
    }


def make_trainer(folder: Path, config: ParallelismConfig) -> Any:
    return transformers.Trainer(
        model=cases.build("Llama", "sdpa"),
        args=transformers.TrainingArguments(**settings(folder, config)),
        train_dataset=[{"input_ids": row} for row in ROWS],
        data_collator=padded,
    )


def make_packing_trainer(folder: Path, config: ParallelismConfig) -> Any:
    import trl
    from datasets import Dataset

    return trl.SFTTrainer(
        model=cases.build("Llama", "sdpa"),
        args=trl.SFTConfig(packing=True, max_length=16, pad_to_multiple_of=2, **settings(folder, config)),
        train_dataset=Dataset.from_dict({"input_ids": ROWS}),
        processing_class=tiny.tokenizer(),
    )


@ranks(2)
def test_text_is_generated_from_full_sequences(rank: int, world: int) -> None:
    accelerator = sequence_parallel()
    plain = cases.build("Llama", "sdpa").eval()
    prompt = cases.inputs_of("plain")[0]["input_ids"]
    expected = plain.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    model = accelerator.prepare(cases.build("Llama", "sdpa")).eval()
    unwrapped = accelerator.unwrap_model(model)
    assert torch.equal(unwrapped.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True), expected)
    with pytest.raises(ValueError, match="every rank was called with the same tokens"):
        unwrapped.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)


# ---- what is refused ------------------------------------------------------------------------------------------------


@ranks(2)
def test_what_would_train_on_wrong_tokens_is_refused_on_both_ranks(rank: int, world: int) -> None:
    accelerator = sequence_parallel()
    model = accelerator.prepare(cases.build("Llama", "sdpa"))
    full, labels = cases.inputs_of("plain")
    local = {name: tensor.chunk(2, dim=1)[rank] for name, tensor in full.items()}
    tokens = {"input_ids": local["input_ids"]}
    refused: list[tuple[dict[str, Any], str]] = [
        (full if rank else local, "rank 0 has 2 x 8, rank 1 has 2 x 16.* Shard the batch on every rank"),
        (tokens, "called without position_ids"),
        ({**tokens, "position_ids": full["position_ids"]}, "position_ids must have the shape of input_ids"),
        ({**local, "attention_mask": torch.ones(2, 5)}, r"attention_mask is a Tensor of shape \(2, 5\)"),
        (
            {**local, "attention_mask": torch.ones(2, 8)} if rank else local,
            "Every rank needs one of the shape of input_ids",
        ),
        (full, "every rank was called with the same tokens at the same positions"),
        ({"position_ids": local["position_ids"]}, "called without input_ids and inputs_embeds"),
        (
            {**local, "past_key_values": transformers.DynamicCache()},
            "called with past_key_values, as prefix tuning does",
        ),
        ({**local, "labels": labels.chunk(2, dim=1)[rank]}, "labels of shape .2, 8. are those of a shard"),
    ]
    for inputs, message in refused:
        with pytest.raises(ValueError, match=message):
            model(**inputs)
    positions = torch.arange(8).expand(2, 8)
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples("plain"), batch_size=2))
    batch = next(iter(loader))
    with (
        pytest.raises(
            ValueError, match=r"Buffer 1 of shape \(2, 8\) was made from a batch that the prepared data loader"
        ),
        accelerator.maybe_context_parallel([batch["input_ids"], positions.clone()], [1, 1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="has 15 tokens, which sp_size=2 does not divide"),
        accelerator.maybe_context_parallel([torch.zeros(2, 15)], [1]),
    ):
        pass


@ranks(2)
def test_models_that_cannot_be_sharded_are_refused_before_anything_is_changed(rank: int, world: int) -> None:
    accelerator = sequence_parallel()
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, num_layers=1, num_heads=2, vocab_size=32)
    )
    uneven = transformers.LlamaConfig(
        **{**cases.SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    )
    bart = transformers.BartForCausalLM(
        transformers.BartConfig(d_model=32, decoder_layers=1, decoder_attention_heads=4, vocab_size=32)
    )
    for model, message in (
        (cases.FAMILIES["Falcon, ALiBi"](), "FalconForCausalLM computes attention by itself"),
        (cases.FAMILIES["Jamba"](), "JambaForCausalLM has layers of the kinds 'linear_attention'"),
        (t5, "T5ForConditionalGeneration"),
        (
            transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**cases.SIZES)),
            "LlamaForSequenceClassification computes one output for a sequence",
        ),
        (transformers.LlamaForCausalLM(uneven), "cannot split 3 attention heads evenly over 2 ranks"),
        (bart, "BartForCausalLM takes no position_ids"),
        (cases._masked("Roberta"), "RobertaForMaskedLM derives positions from the padding"),
        (
            cases._decoder("OPT", ffn_dim=32, word_embed_proj_dim=32),
            "OPTForCausalLM derives positions from the padding",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            accelerator.prepare(model)
        assert not any(part._forward_pre_hooks for part in model.modules())
