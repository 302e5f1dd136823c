"""A training script for rehearsals and for real runs of the same: MODEL ENGINE [checkpointing] [bf16]."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import PipelineParallelConfig

SAMPLES, TOKENS, VOCABULARY = 48, 32, 96


def fsdp(version: int = 2) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap")


ENGINES: dict[str, Any] = {
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": fsdp(1)},
    "fsdp2": lambda: {"fsdp_plugin": fsdp()},
    "hsdp": lambda: {
        "fsdp_plugin": fsdp(),
        "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    },
    "fsdp2-tp": lambda: {"fsdp_plugin": fsdp(), "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "cp": lambda: {"parallelism_config": ParallelismConfig(cp_size=2)},
    "pp": lambda: {"parallelism_config": ParallelismConfig(pp_size=2)},
    "pp-1f1b": lambda: {
        "parallelism_config": ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(schedule="1f1b"))
    },
    "pp-interleaved": lambda: {
        "parallelism_config": ParallelismConfig(
            pp_size=2, pp_handler=PipelineParallelConfig(schedule="interleaved1f1b", stages_per_rank=2)
        )
    },
    "fsdp2-pp": lambda: {"fsdp_plugin": fsdp(), "parallelism_config": ParallelismConfig(dp_shard_size=2, pp_size=2)},
    "sp": lambda: {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="torch")},
}


def language_model(kind: str) -> torch.nn.Module:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    if kind == "llama":
        llama = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, use_cache=False, **sizes)
        return transformers.LlamaForCausalLM(llama)
    if kind == "gpt2":
        shape = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": 64, "n_layer": 4, "n_head": 4}
        without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **shape, **without_dropout))
    vit = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=8, **sizes)
    return transformers.ViTForImageClassification(vit)


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    if kind == "vit":
        return [
            {"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(index % 8)} for index in range(SAMPLES)
        ]
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def train(kind: str, engine: str, *flags: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if "bf16" in flags else "no", **ENGINES[engine]())
    model = language_model(kind)
    if "checkpointing" in flags:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(kind), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        if engine == "cp":
            batch["position_ids"] = torch.arange(TOKENS).repeat(len(batch["labels"]), 1)
            buffers = list(batch.values())
            with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
        else:
            loss = model(**batch).loss
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(*sys.argv[1:])
