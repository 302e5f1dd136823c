"""Profile some steps of a training with torch.profiler, on all processes.

    accelerate launch profiler.py
    accelerate launch --num_processes 2 profiler.py --record_shapes --with_flops

What differs from `cv_example.py`: `ProfileKwargs` says what is recorded, and `accelerator.profile()` is the block. Each process
writes a trace into `--output_trace_dir`, for chrome://tracing or Perfetto; the main process also prints where the time
went. `profiler.step()` ends a step: one is skipped, one warms up, two are recorded. The last line is an accuracy of at
least 0.95.
"""

import argparse
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed


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
    parser.add_argument("--output_trace_dir", default="runs/profiler", help="folder for the traces")
    parser.add_argument("--record_shapes", action="store_true", help="with the shapes of the inputs")
    parser.add_argument("--profile_memory", action="store_true", help="with what operators allocate and free")
    parser.add_argument("--with_stack", action="store_true", help="with the lines of Python that called them")
    parser.add_argument("--with_flops", action="store_true", help="with floating point operations")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        record_shapes=args.record_shapes,
        profile_memory=args.profile_memory,
        with_stack=args.with_stack,
        with_flops=args.with_flops,
        output_trace_dir=args.output_trace_dir,
    )
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, kwargs_handlers=[handler])
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *make_loaders(args.batch_size))

    for epoch in range(args.epochs):
        model.train()
        with accelerator.profile() if epoch == 0 else nullcontext() as profiler:
            for images, labels in train_loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if profiler is not None:
                    profiler.step()
        accelerator.print(f"epoch {epoch + 1}: accuracy {evaluate(accelerator, model, eval_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
