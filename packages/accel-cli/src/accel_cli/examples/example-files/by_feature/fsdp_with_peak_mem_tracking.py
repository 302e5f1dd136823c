"""Shard parameters, gradients and optimizer states with FSDP, and see how much memory each epoch takes at most.

    accelerate launch --num_processes 2 fsdp_with_peak_mem_tracking.py
    accelerate launch --num_processes 2 --mixed_precision bf16 fsdp_with_peak_mem_tracking.py --fsdp_version 1

What differs from `cv_example.py`: `FullyShardedDataParallelPlugin`, and the block `PeakMemory` around each epoch. On a GPU it
shows what torch allocated; on the CPU, the largest resident size of the process so far. One process has nothing to shard,
and warns. The last line is an accuracy of at least 0.95.
"""

import argparse
import resource
from typing import Self

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Training batches, and batches of a held-out fifth: images, (batch, 1, 8, 8), from 0 to 1, and their digits."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(digits))
    train, held_out = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(held_out, batch_size=64)


def make_model() -> nn.Module:
    """A network from images, (batch, 1, 8, 8), to logits, (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The accuracy; each image counts once, also where the last batch was padded to serve all processes."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.no_grad():
            predicted = model(images).argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        correct += (predicted == labels).sum().item()
        total += len(labels)
    return correct / total


class PeakMemory:
    """A block that measures in `peak`, in bytes, the most memory that this process has used."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.on_cpu = accelerator.device.type == "cpu"
        self.peak = 0

    def __enter__(self) -> Self:
        if not self.on_cpu:
            torch.accelerator.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.peak = kilobytes * 1024 if self.on_cpu else torch.accelerator.max_memory_allocated()


def to_local(parameter: torch.Tensor) -> torch.Tensor:
    """This process's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp_version", type=int, choices=[1, 2], default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=args.fsdp_version, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, fsdp_plugin=plugin)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *make_loaders(args.batch_size))
    own = sum(parameter.numel() for parameter in map(to_local, model.parameters()))
    print(f"process {accelerator.process_index} stores {own:,} parameters", flush=True)

    for epoch in range(args.epochs):
        with PeakMemory(accelerator) as memory:
            model.train()
            for images, labels in train_loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        result = f"accuracy {evaluate(accelerator, model, eval_loader):.3f}"
        accelerator.print(f"epoch {epoch + 1}: peak memory {memory.peak / 2**20:.0f} MiB, {result}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
