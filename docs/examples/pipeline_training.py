"""Train a language model in stages, each process holding one, with the loop of a single process.

    accelerate launch --cpu --num_processes 2 docs/examples/pipeline_training.py
    accelerate launch --cpu --num_processes 4 docs/examples/pipeline_training.py --copies 2 --schedule 1f1b

The data are made up: in each sequence, tokens follow one another in a fixed step. Prints the same losses for any number of
stages, copies and microbatches, except for rounding.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import PipelineParallelConfig, set_seed

VOCABULARY = 64


class LanguageModel(nn.Module):
    """Returns logits of shape (batch, sequence, vocabulary), with labels also the loss."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied, though first and last stage hold one each

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        output = {"logits": self.head(hidden)}
        if labels is not None:
            shifted = output["logits"][:, :-1].flatten(0, 1)
            output["loss"] = nn.functional.cross_entropy(shifted, labels[:, 1:].flatten())
        return output


def make_loader(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (512, 1), generator=generator)
    step = torch.randint(1, 4, (512, 1), generator=generator)
    return DataLoader(TensorDataset((start + step * torch.arange(16)) % VOCABULARY), batch_size=batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=1, help="pipelines that read different data")
    parser.add_argument("--schedule", default="gpipe", choices=("gpipe", "1f1b", "interleaved1f1b"))
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    from accelerate import PartialState

    stages = PartialState().num_processes // arguments.copies
    handler = PipelineParallelConfig(arguments.schedule, arguments.microbatches) if stages > 1 else None
    config = ParallelismConfig(pp_size=stages, dp_replicate_size=arguments.copies, pp_handler=handler)
    accelerator = Accelerator(parallelism_config=config if config.total_size > 1 else None)
    set_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(32 // arguments.copies))
    own = sum(parameter.numel() for parameter in model.parameters())
    accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index} holds {own:,} parameters", flush=True)

    for epoch in range(arguments.epochs):
        for (input_ids,) in loader:
            loss = model(input_ids, labels=input_ids)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.gather_for_metrics(loss.detach()).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
