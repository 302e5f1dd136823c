"""Classify images with a convolutional network, on one process or many: a whole training loop with `accelerate`.

    accelerate launch cv_example.py
    accelerate launch --num_processes 2 --mixed_precision bf16 cv_example.py
    accelerate launch cv_example.py --data_dir images --mixed_precision fp16

Without `--data_dir`, the data are the 1,797 handwritten digits that ship with scikit-learn. The last line is the accuracy on the fifth of them
that was held out: at least 0.95. `--data_dir` needs pillow. `complete_cv_example.py` adds models of timm, your own images, checkpoints and tracking.
"""

import argparse
from pathlib import Path

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


def make_picture_loaders(folder: str, batch_size: int) -> tuple[list[str], DataLoader, DataLoader]:
    """The same of a folder of pictures named after what they show, as `beagle_12.jpg`: the names, and batches of (3, 32, 32)."""
    from PIL import Image

    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".jpg", ".jpeg", ".png"))
    names = sorted({path.stem.rpartition("_")[0] for path in paths})
    rows = []
    for path in paths:
        pixels = bytearray(Image.open(path).convert("RGB").resize((32, 32)).tobytes())
        image = torch.frombuffer(pixels, dtype=torch.uint8).reshape(32, 32, 3).permute(2, 0, 1) / 255
        rows.append((image, names.index(path.stem.rpartition("_")[0])))
    if not rows:
        raise SystemExit(f"--data_dir {folder}: no pictures. Their names must be like beagle_12.jpg.")
    train, held_out = random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(0))
    return names, DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(held_out, batch_size=64)


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


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--data_dir", help="a folder of pictures such as beagle_12.jpg, in place of the digits")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(0)
    model = make_model()
    if args.data_dir:
        names, *loaders = make_picture_loaders(args.data_dir, args.batch_size)
        model[0], model[5] = nn.Conv2d(3, 32, kernel_size=3, padding=1), nn.AdaptiveMaxPool2d(2)
        model[-1] = nn.Linear(256, len(names))
    else:
        loaders = list(make_loaders(args.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: accuracy {evaluate(accelerator, model, eval_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
