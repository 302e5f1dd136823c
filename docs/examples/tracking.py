"""Follow a training run: curves, pictures and tables in one tracker or many, a progress bar, and where the time goes.

    accelerate launch --cpu --num_processes 2 docs/examples/tracking.py
    accelerate runs --dir runs/tracking
    accelerate runs --dir runs/tracking --html runs/tracking/page.html

    accelerate launch --cpu docs/examples/tracking.py --log_with local tensorboard wandb --offline

`local` is always there; the other trackers come with `pip install 'accelerate[tensorboard]'` and so on. `--log_with
all` takes those that are installed, and `--offline` keeps everything on this machine.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_tracking import progress_bar
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process
from accelerate.utils import ProfileKwargs, set_seed

logger = get_logger(__name__)


class BestTracker(GeneralTracker):
    """A custom tracker: remembers the best value of every metric and writes them to a file."""

    name = "best"
    requires_logging_directory = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)
        self.best: dict[str, float] = {}

    @property
    def tracker(self) -> dict[str, float]:
        """The best values so far, by name."""
        return self.best

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Take values in; losses are better when lower."""
        for name, value in values.items():
            choose = min if "loss" in name else max
            self.best[name] = choose(self.best.get(name, value), value)

    @on_main_process
    def finish(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.best, indent=1))


def offline_arguments(folder: str) -> dict[str, dict[str, Any]]:
    """What makes each service keep to this machine: variables of the environment, or arguments for `init_trackers`."""
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": folder,
        "TRACKIO_DIR": f"{folder}/trackio",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    if "clearml" in get_available_trackers():
        from clearml import Task

        Task.set_offline(True)
    return {
        "comet_ml": {"online": False},
        "dvclive": {"dir": f"{folder}/dvclive", "save_dvc_exp": False, "dvcyaml": None},
        "mlflow": {"logging_dir": f"{folder}/mlflow"},
        "swanlab": {"mode": "offline", "log_dir": f"{folder}/swanlab"},
        "trackio": {"embed": False},
    }


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Scans of handwritten digits, shape (batch, 64), in [0, 1]; a fifth of them for testing."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, list[list[Any]], Any]:
    """Accuracy, the first mistakes as rows (true digit, read digit), and the scans that were misread."""
    wrong, scans, correct, total = [], [], 0, 0
    for images, digits in loader:
        with torch.no_grad():
            read = model(images).argmax(dim=-1)
        images, digits, read = accelerator.gather_for_metrics((images, digits, read))
        correct += (read == digits).sum().item()
        total += len(digits)
        for place in (read != digits).nonzero().flatten().tolist():
            wrong.append([digits[place].item(), read[place].item()])
            scans.append(images[place].view(8, 8, 1).expand(8, 8, 3).mul(255).byte().cpu().numpy())
    return correct / total, wrong[:8], scans[:4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log_with", nargs="+", default=["local"], help="names of trackers, or all")
    parser.add_argument("--offline", action="store_true", help="no service sends anything")
    parser.add_argument("--output", default="runs/tracking", help="folder for everything that is written")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()

    best = BestTracker(f"{args.output}/best.json")
    accelerator = Accelerator(log_with=[*args.log_with, best], project_dir=args.output)
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, *make_loaders(args.batch_size))

    accelerator.init_trackers(
        "digits", config=vars(args), init_kwargs=offline_arguments(args.output) if args.offline else None
    )
    logger.warning("logging with %s", [tracker.name for tracker in accelerator.trackers])

    def train_epoch(step: int) -> int:
        for images, digits in (bar := progress_bar(train_loader, desc="training")):
            loss = nn.functional.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"train_loss": loss.item(), "learning_rate": args.learning_rate}, step=step)
            bar.show(loss=loss)
            step += 1
        return step

    step = 0
    for epoch in progress_bar(range(args.epochs), desc="epochs", unit=" epochs"):
        if epoch == 0:
            step = train_epoch(step)
        elif epoch == 1:  # the first one also warms up
            with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=f"{args.output}/traces")):
                step = train_epoch(step)
        else:
            step = train_epoch(step)
        accuracy, wrong, scans = evaluate(accelerator, model, test_loader)
        accelerator.log({"test_accuracy": accuracy, "epoch": epoch}, step=step)

    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({"misread": torch.tensor(scans[0])[None]}, step=step, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images({"misread": scans}, step=step)
        if hasattr(tracker, "log_table"):
            tracker.log_table("mistakes", columns=["digit", "read as"], data=wrong, step=step)
    accelerator.print(f"test accuracy {accuracy:.2%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
