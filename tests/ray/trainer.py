"""Run by the tests of Ray: an `Accelerator` in a function of `TorchTrainer`, which restarts it once on the nodes that are left."""

import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.ray.training import train


def work(config: dict[str, Any]) -> None:
    train(Path(config["folder"]), waits_at=3)


folder = sys.argv[1]
TorchTrainer(
    work,
    train_loop_config={"folder": folder},
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
    run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)),
).fit()
