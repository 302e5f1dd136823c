"""Loss and gradients of transformers' models whose sequences are sharded, against one process: `python -m tools.long_sequences`.

Prints the table of docs/parallelism.md. A cell is the largest relative difference of the loss and the gradients in float32, or
"refused"; anything above the limits ends the run with status 1. `tests/clients/test_long_sequences.py` runs some of its rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy, pad

from accelerate import Accelerator
from accelerate.utils import ParallelismConfig

LENGTH, BATCH, VOCABULARY, IGNORED = 16, 2, 32, -100
MOST = {"sp": 1e-6, "cp": 2e-6}
"""A ring sums attention block by block, in another order than one process."""
MODES = ("sp 2", "sp 4", "cp 2")
KINDS = ("plain", "packed", "left padding", "right padding")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEW = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _decoder(name: str, **options: Any) -> Any:
    kind = getattr(transformers, name if "LM" in name else f"{name}ForCausalLM")
    return kind(kind.config_class(**{**SIZES, **options}))


def _masked(name: str, **options: Any) -> Any:
    kind = getattr(transformers, f"{name}ForMaskedLM")
    return kind(kind.config_class(**{**FEW, **options}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": partial(_decoder, "Llama"),
    "Llama, 1 key head": partial(_decoder, "Llama", num_key_value_heads=1),
    "Qwen 2": partial(_decoder, "Qwen2"),
    "Qwen 2, window 4 in one layer": partial(
        _decoder, "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "Qwen 3": partial(_decoder, "Qwen3", head_dim=8),
    "Mistral, window 4": partial(_decoder, "Mistral", sliding_window=4),
    "Mistral, window 64": partial(_decoder, "Mistral", sliding_window=64),
    "Mixtral": partial(_decoder, "Mixtral", num_local_experts=2, num_experts_per_tok=1, sliding_window=None),
    "Phi 3": partial(_decoder, "Phi3"),
    "Gemma 2, window 4, soft-capped": partial(_decoder, "Gemma2", head_dim=8, sliding_window=4),
    "Gemma 3, window 4": partial(
        _decoder, "Gemma3", head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt-oss, window 4, sinks": partial(
        _decoder,
        "GptOss",
        head_dim=8,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Llama 4, chunks of 4": partial(
        _decoder,
        "Llama4",
        head_dim=8,
        attention_chunk_size=4,
        num_local_experts=2,
        interleave_moe_layer_step=3,
        intermediate_size_mlp=32,
    ),
    "Cohere 2, window 4": partial(
        _decoder, "Cohere2", sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "OLMo 2": partial(_decoder, "Olmo2"),
    "GLM 4": partial(_decoder, "Glm4", head_dim=8),
    "DeepSeek V3": partial(
        _decoder,
        "DeepseekV3",
        num_key_value_heads=4,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        **MLA,
    ),
    "GPT-NeoX": partial(_decoder, "GPTNeoX"),
    "GPT-2": partial(_decoder, "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_DROPOUT),
    "BERT": partial(_masked, "Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "ModernBERT, window 4": partial(_masked, "ModernBert", local_attention=4, global_attn_every_n_layers=2),
    "Falcon, ALiBi": partial(_decoder, "Falcon", alibi=True),
    "Jamba": partial(
        _decoder, "Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False
    ),
}


def inputs_of(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch and the label of each token's successor, int64 (batch, sequence)."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    labels = pad(tokens[:, 1:], (0, 1), value=IGNORED)
    batch = {"input_ids": tokens, "position_ids": positions.clone()}
    if kind == "packed":
        begins = torch.tensor([[7, 11], [8, 13]])
        batch["position_ids"] = positions - sum(
            (positions >= begin) * (begin - last) for begin, last in _steps(begins)
        )
        labels.scatter_(1, begins - 1, IGNORED)
    if kind in ("left padding", "right padding"):
        lengths = torch.tensor([[12], [9]])
        is_real = positions < lengths if kind == "right padding" else positions >= LENGTH - lengths
        batch["attention_mask"] = is_real.long()
        labels = labels.where(is_real & pad(is_real[:, 1:], (0, 1)), IGNORED)
        if kind == "left padding":
            batch["position_ids"] = (positions - (LENGTH - lengths)).clamp(min=0)
    return batch, labels


def _steps(begins: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each packed sample after the first, where it begins, and where the one before began."""
    last = torch.zeros_like(begins[:, :1])
    for start in begins.split(1, dim=1):
        yield start, last
        last = start


def attentions_of(family: str) -> list[str]:
    """The implementations of a model's attention that train on the CPU."""
    return [name for name in ("sdpa", "eager") if name == "eager" or FAMILIES[family]()._supports_sdpa]


def build(family: str, attention: str) -> Any:
    """A tiny model with weights that depend on its family alone."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.train()


def loss_of(model: Any, batch: dict[str, torch.Tensor], labels: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The part of these labels in the mean loss of a number of tokens."""
    logits = model(**batch).logits.flatten(0, 1).float()
    return cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / num_tokens


def difference(accelerator: Accelerator, family: str, attention: str, kind: str) -> float:
    """The largest relative difference of the loss and of a gradient to one process.

    Raises:
        ValueError: The model, or its batch, is refused.
    """
    batch, labels = inputs_of(kind)
    num_tokens = int((labels != IGNORED).sum())
    plain = build(family, attention)
    expected = loss_of(plain, batch, labels, num_tokens)
    expected.backward()
    model = accelerator.prepare(build(family, attention))
    size = accelerator.num_processes
    buffers = [*batch.values(), labels]
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
        loss = loss_of(model, batch, labels, num_tokens)
        accelerator.backward(size * loss)  # gradients are averaged over the ranks
    worst = abs(accelerator.reduce(loss.detach(), "sum").item() / expected.item() - 1)
    for weight, wanted in zip(accelerator.unwrap_model(model).parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None and wanted.grad.abs().max() > 1e-6:
            worst = max(worst, ((weight.grad - wanted.grad).abs().max() / wanted.grad.abs().max()).item())
    return worst


def run_rank(mode: str, families: list[str]) -> None:
    """Compute the rows of one mode, and print each as JSON on rank 0."""
    axis, size = mode.split()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{f"{axis}_size": int(size)}))
    for family in families:
        for attention in attentions_of(family):
            for kind in KINDS:
                try:
                    cell: Any = difference(accelerator, family, attention, kind)
                except (ValueError, RuntimeError) as error:
                    cell = str(error)
                if accelerator.is_main_process:
                    print("ROW " + json.dumps([family, attention, kind, cell]), flush=True)


def rows_of(mode: str, families: list[str]) -> dict[tuple[str, str, str], Any]:
    """The cells of one mode by family, attention and kind of batch."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", mode.split()[1]]
    script = [__file__, "--rank-of", mode, *(word for family in families for word in ("--family", family))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_WATCH": "0"}
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return {(family, attention, kind): cell for family, attention, kind, cell in rows}


def cell_of(figures: dict[str, Any]) -> str:
    """One cell of the table: the largest difference, and for which kinds of batches it is one."""
    right = {kind: figure for kind, figure in figures.items() if isinstance(figure, float)}
    if not right:
        return "refused"
    kinds = "" if len(right) == len(figures) else f" ({', '.join(right)})"
    return f"{max(right.values()):.0e}{kinds}"


def main() -> int:
    """Print the table; returns 1 if a cell is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--family", action="append", choices=list(FAMILIES), help="One family only; may be given again."
    )
    parser.add_argument("--reasons", action="store_true", help="Print why cells were refused.")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    families = options.family or list(FAMILIES)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.rank_of:
        run_rank(options.rank_of, families)
        return 0
    modes = {mode: rows_of(mode, families) for mode in MODES}
    print("| model | attention | " + " | ".join(f"`{mode}`" for mode in MODES) + " |")
    print("|---|---|" + "---|" * len(MODES))
    for family, attention in dict.fromkeys(row[:2] for row in modes[MODES[0]]):
        cells = [cell_of({kind: modes[mode][family, attention, kind] for kind in KINDS}) for mode in MODES]
        print(f"| {family} | {attention} | {' | '.join(cells)} |")
    worst = {
        axis: max(
            cell for mode in MODES if mode.startswith(axis) for cell in modes[mode].values() if isinstance(cell, float)
        )
        for axis in MOST
    }
    reasons = {
        (row[0], mode, cell) for mode, rows in modes.items() for row, cell in rows.items() if isinstance(cell, str)
    }
    print(
        f"\nThe largest relative differences: {', '.join(f'`{axis}` {value:.1e}' for axis, value in worst.items())}."
    )
    for family, mode, reason in sorted(reasons) if options.reasons else ():
        print(f"{mode}, {family}: {reason}")
    return int(any(value > MOST[axis] for axis, value in worst.items()))


if __name__ == "__main__":
    sys.exit(main())
