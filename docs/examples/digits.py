"""Read handwritten digits: a small convolutional network on real scans, on one process or many.

    accelerate launch --cpu --num_processes 2 docs/examples/digits.py
    accelerate launch --cpu --num_processes 2 docs/examples/digits.py --epochs 16 --resume

The batch size is the global one, so any number of processes trains the same model. The data are the 1,797 scans of
8 x 8 pixels that ship with scikit-learn.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed, tqdm


class Progress:
    """How far training has come; registered with the accelerator, so that it is part of every checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def make_model() -> nn.Module:
    """A network of two convolutions for images of shape (batch, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Training and test batches of images in [0, 1] with their digits, the test set a stratified fifth."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=batch_size, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=batch_size),
    )


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The fraction of test images read correctly; every image counts once, however many processes there are."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.no_grad():
            predicted = model(images).argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        correct += (predicted == labels).sum().item()
        total += len(labels)
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--output", default="runs/digits", help="folder for the checkpoint, which each epoch replaces")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    checkpoint = os.path.join(args.output, "checkpoint")
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    train_loader, test_loader = make_loaders(args.batch_size)
    steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1 - step / steps))
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(checkpoint)
        accelerator.print(f"resumed after epoch {progress.epoch}")

    while progress.epoch < args.epochs:
        model.train()
        for images, labels in tqdm(train_loader, desc=f"epoch {progress.epoch + 1:2}", leave=False):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        progress.epoch += 1
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {progress.epoch:2}: test accuracy {accuracy:.2%}")
        accelerator.save_state(checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()
