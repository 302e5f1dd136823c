"""Metrics over all processes: each image must count once, although the last batch is padded to serve all of them.

    accelerate launch --num_processes 2 multi_process_metrics.py
    accelerate launch multi_process_metrics.py

What differs from `cv_example.py`: the evaluation collects all predictions with `gather_for_metrics`, which drops the padding,
for a metric that needs them together (here the F1 score of scikit-learn), and counts what plain `gather` would have
returned. The last line is an F1 score of at least 0.95 over 359 images.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
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


def predict(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Predictions and labels of all images, on every process, and the number of predictions that includes padding."""
    model.eval()
    batches, with_padding = [], 0
    for images, labels in loader:
        with torch.no_grad():
            predicted = model(images).argmax(dim=-1)
        with_padding += len(accelerator.gather(predicted))
        batches.append(accelerator.gather_for_metrics((predicted, labels)))
    return torch.cat([first for first, _ in batches]), torch.cat([second for _, second in batches]), with_padding


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *make_loaders(args.batch_size))

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        predicted, labels, with_padding = predict(accelerator, model, eval_loader)
        score = f1_score(labels.cpu(), predicted.cpu(), average="macro")
        accelerator.print(f"epoch {epoch + 1}: {with_padding} predictions with padding, {len(labels)} without")
        accelerator.print(f"epoch {epoch + 1}: F1 {score:.3f} over {len(labels)} images")
    accelerator.end_training()


if __name__ == "__main__":
    main()
