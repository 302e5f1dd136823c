"""Checks that sequence-parallel ranks train to the losses of one process with full sequences.

By itself: `accelerate launch --num_processes 2 .../external_deps/test_ds_alst_ulysses_sp.py`. One check needs DeepSpeed and
transformers; the other one, of `sp_backend="torch"`, needs neither.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.test_utils.scripts.checks.check import Process, SkippedError, checks, make_accelerator
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.external_deps.needs import need_deepspeed
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    is_transformers_available,
)

WORDS, LENGTH, WIDTH, HEADS, BATCH, STEPS = 32, 16, 16, 4, 2, 4
IGNORED = -100


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token tells the next one, most of the time."""

    def __init__(self, count: int = BATCH * STEPS) -> None:
        steps = torch.randint(1, 4, (count, LENGTH), generator=torch.Generator().manual_seed(1))
        self.tokens = steps.cumsum(1) % WORDS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}


class Writer(nn.Module):
    """A causal language model with one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) to logits, (batch, sequence, words)."""
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        query, key, value = (
            layer(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: torch.Tensor = self.head(hidden + mixed.transpose(1, 2).flatten(2))
        return logits


def collate_fn(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of sequences of one length."""
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def make_writer() -> Writer:
    """Make the model, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Writer()


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the tokens of a batch, or of a part of it, and how many there are."""
    shifted = batch.get("shift_labels")
    if shifted is None:
        shifted = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    logits = getattr(output, "logits", output).float()
    return functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()), (shifted != IGNORED).sum()


def losses_of_one_process() -> list[float]:
    """The losses of training on one process, without any library."""
    model = make_writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in DataLoader(Counting(), batch_size=BATCH, collate_fn=collate_fn):
        loss, _ = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> list[float]:
    """Train on shards of sequences; the losses are those of full batches."""
    losses = []
    for batch in loader:
        loss, count = loss_of(model, batch)
        loss = accelerator.mean_over_tokens(loss, count)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_torch(process: Process) -> None:
    """Sequences shared by torch's means."""
    need_processes(process)
    config = ParallelismConfig(sp_size=process.world, sp_backend="torch")
    accelerator = make_accelerator(parallelism_config=config, mixed_precision="no")
    model = make_writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(Counting(), batch_size=BATCH, collate_fn=collate_fn)
    losses = train(accelerator, *accelerator.prepare(model, optimizer, loader))
    expected = losses_of_one_process()
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-4), (
        f"losses {losses} instead of {expected}"
    )


def with_deepspeed(process: Process) -> None:
    """Sequences shared by DeepSpeed, in a model of transformers."""
    need_processes(process)
    need_deepspeed(process)
    if not is_transformers_available():
        raise SkippedError("needs transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    config = ParallelismConfig(sp_size=process.world, sp_backend="deepspeed", sp_handler=handler)
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1)
    accelerator = make_accelerator(parallelism_config=config, deepspeed_plugin=plugin)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(Counting(), batch_size=BATCH, collate_fn=collate_fn)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = train(accelerator, model, optimizer, loader)
    assert losses[-1] < losses[0], f"the loss did not decrease: {losses}"


def need_processes(process: Process) -> None:
    """Skip where there is nobody to share with, or the launch has chosen another training engine."""
    if process.world == 1 or HEADS % process.world:
        raise SkippedError(f"needs a number of processes that divides {HEADS}, and more than one")
    if not process.kind.value.startswith("MULTI_"):
        raise SkippedError(f"chooses its training engine itself, and the launch says {process.kind.value}")


SEQUENCES = checks("shared sequences", torch=with_torch, deepspeed=with_deepspeed)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(SEQUENCES)


if __name__ == "__main__":
    sys.exit(main())
