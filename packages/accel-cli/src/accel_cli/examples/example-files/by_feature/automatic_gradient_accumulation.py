"""Keep the batch size that you want, whatever fits into memory: accumulate gradients as often as needed.

    accelerate launch automatic_gradient_accumulation.py --batch_size 64
    accelerate launch --num_processes 2 automatic_gradient_accumulation.py

What differs from `cv_example.py`: `find_executable_batch_size` looks for a batch size that fits, as in `memory.py`, and the
accelerator accumulates gradients until as many samples as were wanted have contributed to a step. `--pretend_limit` raises
the error of a GPU for larger batches. The last line is an accuracy of at least 0.95.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed


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


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend_limit", type=int, default=20, help="larger batches raise an out-of-memory error")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--batch_size", "--observed_batch_size", type=int, default=32, help="of an optimizer step, on each process"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)

    @find_executable_batch_size(starting_batch_size=args.batch_size)
    def train(batch_size: int) -> float:
        accelerator.free_memory()  # what is left of the attempt before
        accelerator.gradient_accumulation_steps = max(1, round(args.batch_size / batch_size))
        accelerator.print(f"batch size {batch_size} x {accelerator.gradient_accumulation_steps} accumulation steps")
        set_seed(0)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *make_loaders(batch_size))
        for _ in range(args.epochs):
            model.train()
            for images, labels in train_loader:
                if len(images) > args.pretend_limit:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return evaluate(accelerator, model, eval_loader)

    accuracy = train()  # without the batch size: the decorator passes it
    accelerator.print(f"final accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
