"""Classify handwritten digits in a training job of Amazon SageMaker, with checkpoints that survive an interrupted job.

    accelerate launch --config_file config_yaml_templates/sagemaker.yaml sagemaker_example.py --num_epochs 5
    accelerate launch --cpu --num_processes 2 sagemaker_example.py --num_epochs 5

Inside a job, SageMaker says where things are: the channel `train` (`digits.npz` with `images` and `labels`, where the job has one), the
folder that goes to S3 when the job ends, and the folder that is kept in step with S3 while it runs. Elsewhere the digits of
scikit-learn and the folder `sagemaker` are used. A job that is started again goes on after its newest checkpoint. The last line is the
accuracy on every fifth digit, which is held out: at least 0.95. Needs scikit-learn.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

HERE = Path("sagemaker")
MODEL = Path(os.environ.get("SM_MODEL_DIR", HERE / "model"))
CHECKPOINTS = Path("/opt/ml/checkpoints") if "SM_MODEL_DIR" in os.environ else HERE / "checkpoints"


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of shape (8, 8) and their labels, for training and for evaluation."""
    channel = os.environ.get("SM_CHANNEL_TRAIN")
    if channel:
        table = np.load(Path(channel, "digits.npz"))
        images, labels = table["images"], table["labels"]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    samples = torch.tensor(images, dtype=torch.float32).reshape(-1, 64) / 16, torch.tensor(labels)
    is_held_out = torch.arange(len(images)) % 5 == 0
    return TensorDataset(*(part[~is_held_out] for part in samples)), TensorDataset(
        *(part[is_held_out] for part in samples)
    )


class Progress:
    """How many epochs are done; saved with each checkpoint."""

    epochs = 0

    def state_dict(self) -> dict[str, int]:
        """What is saved."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what was saved."""
        self.epochs = state["epochs"]


def main() -> None:
    """Train, evaluate, and leave the model where SageMaker takes it from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(str(CHECKPOINTS), automatic_checkpoint_naming=True, total_limit=2)
    )
    train, evaluation = read_digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader, evaluation_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        DataLoader(evaluation, batch_size=args.batch_size),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any(CHECKPOINTS.glob("checkpoints/*")):
        accelerator.load_state()  # the newest one
    for epoch in range(progress.epochs, args.num_epochs):
        model.train()
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        progress.epochs = epoch + 1
        accelerator.save_state()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    hits, count = 0, 0
    with torch.no_grad():
        for images, labels in evaluation_loader:
            guesses, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            hits, count = hits + int((guesses == labels).sum()), count + len(labels)
    accelerator.save_model(model, MODEL)
    accelerator.print(f"accuracy {hits / count:.3f}")


if __name__ == "__main__":
    main()
