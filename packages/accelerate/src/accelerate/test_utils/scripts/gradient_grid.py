"""The script of `accelerate test --grid`: a small language model on texts of many lengths, for every engine and mesh.

Ten batches in windows of three make a short last window, gradients are clipped, and each token counts the same in
whatever batch and rank it is.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 48, 16, 32, 4, 4
BATCH, BATCHES, WINDOW, MAX_NORM = 12, 10, 3, 0.2
NO_LABEL = -100


class Block(nn.Module):
    """Causal attention and two layers, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        normed = self.norm1(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # as many heads as this rank has
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(gelu(self.up(self.norm2(hidden))))


class LanguageModel(nn.Module):
    """A causal language model, which brings its plan for tensor parallelism."""

    tp_plan = dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"), "colwise") | {
        "blocks.*.output": "rowwise", "blocks.*.down": "rowwise", "head": "colwise_rep",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions, both (batch, sequence), to logits."""
        hidden = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_texts() -> list[dict[str, torch.Tensor]]:
    """Texts of 2 to 17 tokens, padded at their end, with the label of each place: the token that follows."""
    texts = []
    for length in torch.randint(1, LENGTH + 1, (BATCH * BATCHES,)).tolist():
        tokens = torch.randint(1, 4, (LENGTH + 1,)).cumsum(0) % VOCABULARY
        labels = tokens[1:].masked_fill(torch.arange(LENGTH) >= length, NO_LABEL)
        texts.append({"input_ids": tokens[:-1], "shift_labels": labels, "position_ids": torch.arange(LENGTH)})
    return texts


def tokens_of_windows(texts: list[dict[str, torch.Tensor]]) -> list[int]:
    """How many tokens count in each accumulation window, on all ranks together."""
    counts = torch.stack([(text["shift_labels"] != NO_LABEL).sum() for text in texts])
    return [int(window.sum()) for window in counts.split(BATCH * WINDOW)]


def main() -> None:
    """Train for an epoch."""
    set_seed(1)
    texts = make_texts()
    # DeepSpeed steps in the backward pass, so that its losses must be divided by the window's tokens beforehand.
    by_hand = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, average_over="steps" if by_hand else "weights")
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    num_tokens = tokens_of_windows(texts)

    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(texts, batch_size=BATCH)  # type: ignore[arg-type] # a list is a data set
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        buffers = list(batch.values())
        with accelerator.accumulate(model):
            with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
                labels = batch["shift_labels"]
                logits = model(batch["input_ids"], batch["position_ids"])
                loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
                if by_hand:
                    scale = accelerator.num_processes * WINDOW / num_tokens[index // WINDOW]
                    accelerator.backward(loss * scale)
                else:
                    weight = (labels != NO_LABEL).sum()
                    accelerator.backward(loss / weight.clamp(min=1), weight=weight)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
