"""Models of the transformers library, shared in every way there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ops.modules import to_local
from accel_state.mesh import ParallelismConfig
from accel_state.settings.parallelism import TorchTensorParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks

transformers = pytest.importorskip("transformers", minversion="5.20")

STEPS = 10
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def mixtral(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **options)
    return transformers.MixtralForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[0, 11:] = -100
    return {"input_ids": tokens, "labels": labels}


def curve(accelerator: Accelerator, model: Any, optimizer: Any = None) -> list[float]:
    """Losses of a model that sees whole sequences."""
    model, optimizer = accelerator.prepare(model, ADAMW(model.parameters()) if optimizer is None else optimizer)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch()).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_curve(model: Any) -> list[float]:
    optimizer = ADAMW(model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(**batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(losses: list[float], expected: list[float]) -> bool:
    return losses == pytest.approx(expected, abs=1e-5) and losses[-1] < losses[0]


def tensor_parallel(experts: bool = False) -> Accelerator:
    handler = TorchTensorParallelConfig(expert_parallel=experts)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_layers_are_shared_by_the_models_own_plan(rank: int, world: int, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    assert same(curve(tensor_parallel(), model), plain_curve(llama(tie_word_embeddings=tied)))
    assert to_local(model.model.layers[0].self_attn.q_proj.weight).shape == (16, 32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("experts", [False, True])
def test_mixtures_of_experts(rank: int, world: int, experts: bool) -> None:
    model = mixtral()
    assert same(curve(tensor_parallel(experts), model), plain_curve(mixtral()))
    held = to_local(model.model.layers[0].mlp.experts.gate_up_proj).shape
    assert held == ((2, 128, 32) if experts else (4, 64, 32))


@pytest.mark.takes_turns
@ranks(2)
def test_a_model_that_was_loaded_in_parts_is_taken_as_it_is(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        llama().save_pretrained(tmp_path)
    torch.distributed.barrier()
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
    assert same(curve(tensor_parallel(), model), plain_curve(llama()))


@ranks(2)
def test_a_model_that_was_loaded_in_parts_needs_its_ranks_to_read_the_same(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        llama().save_pretrained(tmp_path)
    torch.distributed.barrier()
    accelerator = Accelerator(cpu=True)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    by_hand = torch.nn.Sequential(torch.nn.Linear(4, 4))
    torch.distributed.tensor.parallel.parallelize_module(
        by_hand, mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
    )
    for model in (transformers.LlamaForCausalLM.from_pretrained(tmp_path, tp_plan="auto"), by_hand):
        with pytest.raises(
            ValueError, match=r"Write Accelerator\(parallelism_config=ParallelismConfig\(tp_size=2\)\)"
        ):
            accelerator.prepare(model)
    by_fsdp = torch.nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(by_fsdp, mesh=mesh)
    accelerator.prepare(by_fsdp)  # whose ranks read different samples


@ranks(2)
def test_whole_weights_come_back(tmp_path: Path) -> None:
    accelerator = tensor_parallel()
    model = accelerator.prepare(llama())
    weights = accelerator.get_state_dict(model)
    expected = llama().state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    accelerator.save_model(model, tmp_path)
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "pretrained", state_dict=weights, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@ranks(2)
def test_heads_that_cannot_be_divided_are_refused() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    with pytest.raises(ValueError, match="tp_size=2 does not divide num_key_value_heads=1"):
        tensor_parallel().prepare(transformers.LlamaForCausalLM(config))


@ranks(2)
def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="expert_parallel=True needs a model with experts .* LlamaForCausalLM"):
        tensor_parallel(experts=True).prepare(llama())


@ranks(2)
def test_sequences_traded_for_heads() -> None:
    config = ParallelismConfig(sp_size=2, sp_backend="torch")
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = llama()
    loader = torch.utils.data.DataLoader([batch()], batch_size=None, collate_fn=lambda one: one)
    model, optimizer = accelerator.prepare(model, ADAMW(model.parameters()))
    from accel_data.sequence_shard import SequenceShard

    cut = SequenceShard(accelerator.process_index, 2)
    losses = []
    for _ in range(STEPS):
        part = cut({**next(iter(loader)), "attention_mask": torch.ones(4, 16, dtype=torch.long)})
        loss = accelerator.mean_over_tokens(model(**part).loss, (part["shift_labels"] != -100).sum())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert same(losses, plain_curve(llama()))


@ranks(2)
def test_sequences_in_a_ring() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    model = llama()
    model, optimizer = accelerator.prepare(model, ADAMW(model.parameters()))
    losses = []
    for _ in range(STEPS):
        inputs = batch()
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        inputs["position_ids"] = torch.arange(16).expand(4, 16)
        inputs["attention_mask"] = torch.ones(4, 16, dtype=torch.long)
        buffers = list(inputs.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
            loss = model(**inputs).loss
            loss = accelerator.mean_over_tokens(loss, (inputs["shift_labels"] != -100).sum())
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert same(losses, plain_curve(llama()))


SHARDED_SEQUENCES = pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2, "sp_backend": "torch"}])


def mistral(window: int) -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window))


def llama4() -> Any:
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **SIZES, head_dim=8, attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=32
    )
    return transformers.Llama4ForCausalLM(config)


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "use_cache")}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def falcon() -> Any:
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    return transformers.FalconForCausalLM(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32
    )
    return transformers.BartForCausalLM(config)


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


POSITIONS = torch.arange(16).expand(4, 16)
PADDED = (torch.arange(16) < torch.tensor([16, 12, 5, 8])[:, None]).long()


def sharded_loss(accelerator: Accelerator, model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    """The loss of tokens that are not masked, of this rank's shard of the batch."""
    tokens = batch()["input_ids"]
    weights = inputs.get("attention_mask", torch.ones(4, 16))
    weights = (weights if weights.ndim == 2 else torch.ones(4, 16)).float().contiguous()
    inputs = {"input_ids": tokens, **{name: value.clone() for name, value in inputs.items()}}
    cut = [value for value in (*inputs.values(), weights) if value.ndim == 2]
    if accelerator.parallelism_config.sp_enabled:
        rank = accelerator.process_index
        inputs = {name: value.chunk(2, 1)[rank] if value.ndim == 2 else value for name, value in inputs.items()}
        return weighted_loss(model, inputs, weights.chunk(2, 1)[rank])
    with accelerator.maybe_context_parallel(cut, [1] * len(cut), no_restore_buffers=set(cut)):
        loss = weighted_loss(model, inputs, weights)
        accelerator.backward(2 * loss)  # gradients are averaged over the two ranks
    return loss


def weighted_loss(model: Any, inputs: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs).logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, inputs["input_ids"].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / 32


@ranks(2)
@SHARDED_SEQUENCES
def test_sequences_that_need_no_mask_train_as_in_one_process(rank: int, world: int, sizes: dict[str, Any]) -> None:
    """Neither a window as long as the sequences nor padding at their end needs one."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    counted = (PADDED.cumsum(1) - 1).clamp(min=0)
    for build in (llama, partial(mistral, 16), adapted):
        for inputs in (
            {"position_ids": POSITIONS},
            {"position_ids": POSITIONS + 2},
            {"position_ids": POSITIONS, "attention_mask": PADDED},
            {"position_ids": counted, "attention_mask": PADDED},
        ):
            plain = build()
            tokens = {"input_ids": batch()["input_ids"], **inputs}
            weighted_loss(plain, tokens, inputs.get("attention_mask", torch.ones(4, 16)).float()).backward()
            model = accelerator.prepare(build())
            loss = sharded_loss(accelerator, model, **inputs)
            if accelerator.parallelism_config.sp_enabled:
                accelerator.backward(2 * loss)
            for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
                if expected.grad is not None:
                    torch.testing.assert_close(weight.grad, expected.grad, atol=1e-5, rtol=1e-4)


@ranks(2)
def test_a_ring_refuses_what_needs_a_mask(rank: int, world: int) -> None:
    """On both ranks, whichever holds the tokens that show it."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    restarted_at_shards = torch.arange(8).repeat(2).expand(4, 16)
    restarted_in_the_last = torch.cat([torch.arange(14), torch.arange(2)]).expand(4, 16)
    cases: list[tuple[Any, dict[str, torch.Tensor], str]] = [
        (partial(mistral, 15), {}, "MistralForCausalLM has sliding_window=15, but sharded sequences of 16 tokens"),
        (llama4, {}, "Llama4ForCausalLM has attention_chunk_size=4"),
        (falcon, {}, "FalconForCausalLM adds its positions"),
        (bart, {}, "BartForCausalLM takes no position_ids"),
        (bert, {"attention_mask": PADDED}, "sequences are padded, but attention that is not causal"),
        (adapted, {"position_ids": restarted_at_shards}, "position_ids are not consecutive"),
        (llama, {"position_ids": restarted_at_shards}, "position_ids are not consecutive"),
        (llama, {"position_ids": restarted_in_the_last}, "position_ids are not consecutive"),
        (llama, {"attention_mask": PADDED.flip(1)}, r'pad at the end \(padding_side="right"\)'),
        (llama, {"attention_mask": torch.arange(16).expand(4, 16).ge(8).long()}, "masks tokens before others"),
        (llama, {"attention_mask": torch.ones(4, 1, 16, 16)}, r"attention_mask is a Tensor of shape \(4, 1, 16, 16\)"),
    ]
    for build, inputs, message in cases:
        model = accelerator.prepare(build())
        with pytest.raises(ValueError, match=message):
            sharded_loss(accelerator, model, **{"position_ids": POSITIONS, **inputs})
    with pytest.raises(ValueError, match="called without position_ids"):
        sharded_loss(accelerator, accelerator.prepare(llama()))


@ranks(2)
def test_a_ring_refuses_other_attention_than_sdpa(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM uses attn_implementation='eager': choose sp_size instead"):
        accelerator.prepare(gemma)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM uses .*'eager': load it with attn_implementation=\"sdpa\", or"
    ):
        accelerator.prepare(llama(attn_implementation="eager"))
