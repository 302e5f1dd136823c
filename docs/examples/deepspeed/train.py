"""A transformer learns to continue counting, on DeepSpeed: how much is sharded stands in a file.

    accelerate launch --cpu --config_file docs/examples/deepspeed/accelerate.yaml docs/examples/deepspeed/train.py

Another file beside this program is taken with `--deepspeed_config_file docs/examples/deepspeed/zero3.json`. On CPUs,
`DS_BUILD_SHM_COMM=0` spares the minute in which DeepSpeed compiles something at the first start.

The files have sections for an optimizer and a scheduler; `DummyOptim` and `DummyScheduler` say what fills their "auto".
"""

import argparse
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

VOCABULARY, LENGTH, WIDTH = 32, 16, 32


class Counter(nn.Module):
    """Tokens of shape (batch, length) to logits of shape (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH)  # DeepSpeed's buckets follow it
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        return self.head(self.block(hidden, src_mask=mask.to(hidden.dtype), is_causal=True))


def sequences(count: int) -> list[torch.Tensor]:
    """Numbers that grow by one, two or three, each of shape (length + 1,)."""
    starts = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))
    return [(start + (1 + index % 3) * torch.arange(LENGTH + 1)) % VOCABULARY for index, start in enumerate(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="of one process")
    parser.add_argument("--output", help="folder for the weights")
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    loader = DataLoader(sequences(512), batch_size=arguments.batch_size, shuffle=True)  # type: ignore[arg-type]
    model = Counter()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=arguments.epochs * len(loader), warmup_num_steps=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for epoch in range(arguments.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1]).float()
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)  # DeepSpeed clips, steps and clears here
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}, stage {model.zero_optimization_stage()}")
    if arguments.output:
        accelerator.save_model(model, arguments.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
