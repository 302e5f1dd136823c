"""Training needs no more memory than it may.

For example `accelerate launch .../external_deps/test_peak_memory_usage.py --peak_memory_upper_bound 2000` (MB).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch

from accelerate import Accelerator, PartialState
from accelerate.test_utils.scripts.checks.sentences import make_loaders, make_reader, train_epoch
from accelerate.utils import release_memory, set_seed

SEED, BATCH, RATE = 42, 16, 0.02
MB = 2**20


def b2mb(x: float) -> int:
    """Whole megabytes of a number of bytes."""
    return int(x / MB)


class TorchTracemalloc:
    """Measures the memory of a block: of the device where there is one, else of the process.

    Args:
        device: Where the block computes.

    Attributes:
        begin: Bytes in use at the beginning.
        used: Megabytes that stayed in use.
        peaked: Megabytes that were in use at once at most, beyond those at the beginning.
    """

    def __init__(self, device: torch.device) -> None:
        self.backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.begin = self.used = self.peaked = 0

    def __enter__(self) -> TorchTracemalloc:
        release_memory()
        if self.backend is not None:
            self.backend.reset_peak_memory_stats()
        self.begin = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        self.used = b2mb(self._now() - self.begin)
        self.peaked = b2mb(max(0, self._peak() - self.begin))

    def _now(self) -> int:
        if self.backend is not None:
            allocated: int = self.backend.memory_allocated()
            return allocated
        import psutil

        resident: int = psutil.Process().memory_info().rss
        return resident

    def _peak(self) -> int:
        if self.backend is not None:
            allocated: int = self.backend.max_memory_allocated()
            return allocated
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def training_function(config: dict[str, Any], args: argparse.Namespace) -> dict[str, int]:
    """Train, and write the peak of each epoch to `peak_memory_utilization.json`.

    Args:
        config: `lr`, `num_epochs`, `seed` and `batch_size`.
        args: The arguments of the program.

    Returns:
        Megabytes by epoch.

    Raises:
        AssertionError: A peak is above `args.peak_memory_upper_bound`.
    """
    accelerator = Accelerator()
    set_seed(config["seed"])
    model = make_reader(args.model_name_or_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    training, checking = make_loaders(config["batch_size"], args.n_train, args.n_val)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(training) * config["num_epochs"])
    model, optimizer, training, checking, scheduler = accelerator.prepare(
        model, optimizer, training, checking, scheduler
    )
    peaks = {}
    for epoch in range(config["num_epochs"]):
        with TorchTracemalloc(accelerator.device) as memory:
            train_epoch(accelerator, model, optimizer, scheduler, training)
        peaks[f"epoch-{epoch}"] = b2mb(memory.begin) + memory.peaked
        accelerator.print(f"epoch {epoch}: {b2mb(memory.begin)} MB before, {memory.peaked} MB more at the peak")
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "peak_memory_utilization.json"), "w") as file:
            json.dump(peaks, file)
    bound = args.peak_memory_upper_bound
    for epoch_name, peak in peaks.items():
        assert bound is None or peak <= bound, f"{epoch_name} needed {peak} MB, but may need at most {bound} MB"
    return peaks


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="Folder of a model of transformers to train instead of our own.")
    parser.add_argument("--output_dir", default=".", help="Where peak_memory_utilization.json goes.")
    parser.add_argument("--peak_memory_upper_bound", type=float, help="Largest peak memory of an epoch, in MB.")
    parser.add_argument("--n_train", type=int, default=320, help="Sentences to train with.")
    parser.add_argument("--n_val", type=int, default=160, help="Sentences to check with.")
    parser.add_argument("--num_epochs", type=int, default=1, help="Number of epochs.")
    return parser.parse_args(words)


def main() -> int:
    """Run the program; 0 when the memory was enough."""
    args = parse()
    training_function({"lr": RATE, "num_epochs": args.num_epochs, "seed": SEED, "batch_size": BATCH}, args)
    PartialState().destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
