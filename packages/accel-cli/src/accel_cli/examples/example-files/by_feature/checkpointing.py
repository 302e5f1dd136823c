"""Save checkpoints while training, and resume from one, also from the middle of an epoch.

    accelerate launch checkpointing.py --checkpointing_steps 30 --output_dir runs/digits
    accelerate launch checkpointing.py --output_dir runs/digits --resume_from_checkpoint runs/digits/step_60
    accelerate launch checkpointing.py --checkpointing_steps epoch

What differs from `cv_example.py`: `save_state` writes the model, the optimizer and the random states of all processes,
with every object that `register_for_checkpointing` was called with; `load_state` restores them. `skip_first_batches` leaves
out what the interrupted epoch has seen. A resumed run ends with the accuracy of an uninterrupted one: at least 0.95.
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


class Progress:
    """How many optimizer steps were taken; registered with the accelerator, so that checkpoints contain it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the step of a checkpoint."""
        self.step = state["step"]


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/checkpointing", help="where checkpoints go")
    parser.add_argument("--checkpointing_steps", default="50", help="steps between checkpoints, or epoch")
    parser.add_argument("--resume_from_checkpoint", help="the folder of a checkpoint")
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
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        accelerator.print(f"resumed after step {progress.step}")

    every_epoch = args.checkpointing_steps == "epoch"
    first_epoch, seen = divmod(progress.step, len(train_loader))
    for epoch in range(first_epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)  # a shuffling of its own for each epoch, the same one after resuming
        batches = accelerator.skip_first_batches(train_loader, seen) if epoch == first_epoch else train_loader
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if not every_epoch and progress.step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(f"{args.output_dir}/step_{progress.step}")
        accelerator.print(f"epoch {epoch + 1}: accuracy {evaluate(accelerator, model, eval_loader):.3f}")
        if every_epoch:  # after the evaluation, which draws random numbers
            accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
