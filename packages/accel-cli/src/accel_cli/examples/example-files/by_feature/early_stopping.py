"""Stop early on all processes as soon as one of them says so.

    accelerate launch early_stopping.py
    accelerate launch --num_processes 2 early_stopping.py --patience 2

What differs from `cv_example.py`: a process whose share of the held-out images has had no lower loss for `--patience` epochs
calls `set_trigger`; `check_trigger` is true on all processes if any of them did, so that all leave the loop together and none
waits for the others until a timeout. The last line is an accuracy of at least 0.95.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import set_seed


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


def mean_loss(model: nn.Module, loader: DataLoader) -> float:
    """The mean loss of this process's share of the images: the other processes have another one."""
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(images), labels) for images, labels in loader]
    return torch.stack(losses).mean().item()


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a lower loss")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=8e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *make_loaders(args.batch_size))

    lowest, waited = float("inf"), 0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        held_out_loss = mean_loss(model, eval_loader)
        waited = 0 if held_out_loss < lowest else waited + 1
        lowest = min(lowest, held_out_loss)
        if waited >= args.patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(f"no lower loss for {args.patience} epochs: stopped after epoch {epoch + 1}")
            break
    accelerator.print(f"final accuracy {evaluate(accelerator, model, eval_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
