"""Cross-validate: train one model per fold, and classify the test set by the mean of their logits.

    accelerate launch cross_validation.py --num_folds 3
    accelerate launch --num_processes 2 cross_validation.py

What differs from `cv_example.py`: stratified folds of scikit-learn, `free_memory` between them, and `gather_for_metrics` on
logits, which come back in the order of the data set, so that those of different models can be averaged. The last line
is the accuracy of the ensemble on the test set: at least 0.95.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def make_folds(batch_size: int, count: int) -> tuple[list[tuple[DataLoader, DataLoader]], DataLoader]:
    """Per fold, batches to train on and batches to validate with; then the test batches, a fifth of all images."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    rest, test = train_test_split(range(len(digits)), test_size=0.2, random_state=0, stratify=digits)

    def loader(chosen: torch.Tensor, **options: bool) -> DataLoader:
        return DataLoader(TensorDataset(images[chosen], labels[chosen]), batch_size=batch_size, **options)

    kept = torch.tensor(rest)
    folds = StratifiedKFold(count, shuffle=True, random_state=0).split(rest, digits[rest])
    loaders = [(loader(kept[train], shuffle=True), loader(kept[held_out])) for train, held_out in folds]
    return loaders, loader(torch.tensor(test))


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


def predict(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and the labels of all images, on every process."""
    model.eval()
    batches = []
    for images, labels in loader:
        with torch.no_grad():
            batches.append(accelerator.gather_for_metrics((model(images), labels)))
    return torch.cat([logits for logits, _ in batches]), torch.cat([labels for _, labels in batches])


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The fraction of images whose largest logit is that of their label."""
    return (logits.argmax(dim=-1) == labels).float().mean().item()


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(0)
    folds, test = make_folds(args.batch_size, args.num_folds)
    test_loader = accelerator.prepare(test)
    logits: list[torch.Tensor] = []
    for number, (train, held_out) in enumerate(folds):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train, held_out)
        for _ in range(args.epochs):
            model.train()
            for images, labels in train_loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"fold {number + 1}: accuracy {accuracy(*predict(accelerator, model, eval_loader)):.3f}")
        fold_logits, labels = predict(accelerator, model, test_loader)
        logits.append(fold_logits)
        accelerator.free_memory(model, optimizer)
    accelerator.print(f"final accuracy {accuracy(torch.stack(logits).mean(0), labels):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
