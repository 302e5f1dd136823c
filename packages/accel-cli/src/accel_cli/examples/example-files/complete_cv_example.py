"""Image classification with checkpointing, resuming, learning rate schedule, mixed precision, accumulation and trackers.

    accelerate launch complete_cv_example.py --output_dir runs/images --checkpointing_steps epoch
    accelerate launch complete_cv_example.py --output_dir runs/images --resume
    accelerate launch --num_processes 2 complete_cv_example.py --with_tracking --gradient_accumulation_steps 2
    accelerate launch complete_cv_example.py --model resnet18 --data images.npz
    accelerate launch complete_cv_example.py --model resnet18 --data_dir images

It is `cv_example.py` with the features of `by_feature` in one program. The last line is the accuracy on the held-out fifth
of the handwritten digits that ship with scikit-learn: at least 0.95. `--data` is a file of numpy's `savez` with `images`, of
shape (count, channels, height, width), and `labels`, integers from 0; `--data_dir` is a folder of pictures, as in `cv_example.py`.
`--model` is any name that timm knows.
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Progress:
    """How many batches were seen; registered with the accelerator, so that checkpoints contain it."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the batch of a checkpoint."""
        self.batches = state["batches"]


def read_pictures(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures of a folder, (count, 3, 32, 32), which are named after what they show, as `beagle_12.jpg`, and their labels."""
    from PIL import Image

    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".jpg", ".jpeg", ".png"))
    if not paths:
        raise SystemExit(f"--data_dir {folder}: no pictures. Their names must be like beagle_12.jpg.")
    names = sorted({path.stem.rpartition("_")[0] for path in paths})
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((32, 32))) for path in paths])
    labels = torch.tensor([names.index(path.stem.rpartition("_")[0]) for path in paths])
    return torch.tensor(pixels).permute(0, 3, 1, 2).float(), labels


def read_images(path: str | None) -> TensorDataset:
    """Images, (count, channels, height, width), with values from 0 to 1, and their labels."""
    if path and Path(path).is_dir():
        images, labels = read_pictures(path)
    elif path:
        with np.load(path) as arrays:
            images, labels = torch.tensor(arrays["images"]).float(), torch.tensor(arrays["labels"]).long()
    else:
        pixels, digits = load_digits(return_X_y=True)
        images, labels = torch.tensor(pixels).float().reshape(-1, 1, 8, 8), torch.tensor(digits)
    return TensorDataset(images / images.max(), labels)


def make_loaders(dataset: TensorDataset, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Training batches, and batches of a held-out fifth."""
    train, held_out = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(held_out, batch_size=64)


def make_model(name: str | None, channels: int, classes: int) -> nn.Module:
    """A network from images, (batch, channels, height, width), to logits, (batch, classes)."""
    if name:
        import timm

        return timm.create_model(name, pretrained=True, in_chans=channels, num_classes=classes)
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, classes),
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


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of timm, in place of the small network")
    parser.add_argument("--data", "--data_dir", help="an .npz file with images and labels, or a folder of pictures")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=32, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="the highest, after the warm-up")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--checkpointing_steps", help="batches between checkpoints, or epoch; none without it")
    parser.add_argument("--output_dir", default="runs/complete_cv_example", help="for checkpoints and trackers")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint of --output_dir")
    parser.add_argument("--resume_from_checkpoint", help="from the checkpoint of this folder")
    parser.add_argument("--with_tracking", action="store_true", help="use the trackers of --log_with")
    parser.add_argument("--log_with", nargs="+", default=["local"], help="names of trackers, or all")
    return parser.parse_args()


def is_due(args: argparse.Namespace, batches: int, batches_per_epoch: int) -> bool:
    """Whether a checkpoint is to be saved after so many batches."""
    if not args.checkpointing_steps:
        return False
    every = batches_per_epoch if args.checkpointing_steps == "epoch" else int(args.checkpointing_steps)
    return batches % every == 0


def main() -> None:
    """Train and evaluate."""
    args = parse_arguments()
    resumed = args.resume or args.resume_from_checkpoint
    if args.checkpointing_steps and not resumed and os.path.isdir(f"{args.output_dir}/checkpoints"):
        raise SystemExit(
            f"{args.output_dir} has checkpoints of an earlier run. Continue it with --resume, or name another --output_dir."
        )
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.log_with if args.with_tracking else None,
        project_config=ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2),
    )
    if args.with_tracking:
        accelerator.init_trackers("images", config={"epochs": args.epochs, "learning_rate": args.learning_rate})

    set_seed(0)
    dataset = read_images(args.data)
    images, labels = dataset.tensors
    train_loader, eval_loader = make_loaders(dataset, args.batch_size)
    model = make_model(args.model, channels=images.shape[1], classes=int(labels.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = args.epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)  # of one process
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=steps + 1)
    model, optimizer, scheduler, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if resumed:
        accelerator.load_state(args.resume_from_checkpoint)  # None: the newest one
        accelerator.print(f"resumed after batch {progress.batches}")

    first_epoch, seen = divmod(progress.batches, len(train_loader))
    for epoch in range(first_epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)  # a shuffling of its own for each epoch, the same one after resuming
        total = torch.zeros((), device=accelerator.device)
        batches = accelerator.skip_first_batches(train_loader, seen) if epoch == first_epoch else train_loader
        for images, labels in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
            progress.batches += 1
            if is_due(args, progress.batches, len(train_loader)):
                accelerator.save_state()
        accuracy = evaluate(accelerator, model, eval_loader)
        if args.with_tracking:
            values = {"accuracy": accuracy, "train_loss": total.item() / len(train_loader), "epoch": epoch}
            accelerator.log(values, step=progress.batches)
        accelerator.print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
