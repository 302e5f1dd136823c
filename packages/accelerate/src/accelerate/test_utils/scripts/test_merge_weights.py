"""Checks that the sharded weights of FSDP are merged into a full model.

By itself: `accelerate launch --use_fsdp --fsdp_state_dict_type SHARDED_STATE_DICT --num_processes 2
.../test_utils/scripts/test_merge_weights.py`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.test_utils.scripts.checks.check import Check, Process, SkippedError, make_accelerator
from accelerate.test_utils.scripts.checks.checkpoints import folder_of
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.training import assert_same
from accelerate.utils import DistributedType, load, merge_fsdp_weights

SHARDS = "pytorch_model_fsdp_0"


class TinyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 16) to the same."""
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def trained_and_saved(process: Process) -> tuple[str, dict[str, torch.Tensor]]:
    """Train for a few steps, and save.

    Returns:
        The folder of the shards, and the weights; only the first process has all of these.
    """
    if process.kind is not DistributedType.FSDP or process.world == 1:
        raise SkippedError("needs FSDP on several processes: launch with --use_fsdp")
    accelerator = make_accelerator()
    plugin: Any = accelerator.state.fsdp_plugin
    if "SHARDED" not in str(plugin.state_dict_type):
        raise SkippedError("needs --fsdp_state_dict_type SHARDED_STATE_DICT")
    torch.manual_seed(1)
    layers = TinyModel()
    model = accelerator.prepare(layers)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step + 10 * process.rank))
        accelerator.backward(model(batch.to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    folder = folder_of(process, "sharded")
    accelerator.save_state(folder)
    weights = accelerator.get_state_dict(model)
    return os.path.join(folder, SHARDS), {name: value.detach().cpu().clone() for name, value in weights.items()}


def merging(process: Process, *, by_command: bool, safe: bool) -> None:
    """Merge, read and compare."""
    shards, expected = trained_and_saved(process)
    name = f"merged-{by_command}-{safe}"
    folder = folder_of(process, name)
    if not by_command:
        merge_fsdp_weights(shards, folder, safe_serialization=safe)
    elif process.rank == 0:
        run_command(shards, folder, [] if safe else ["--unsafe_serialization"])
    if process.rank:
        return
    if safe:
        from safetensors.torch import load_file

        state_dict = load_file(os.path.join(folder, "model.safetensors"))
    else:
        state_dict = load(os.path.join(folder, "pytorch_model.bin"))
    assert_same(state_dict, expected, tolerance=0)


def run_command(shards: str, folder: str, words: list[str]) -> None:
    """Run `accelerate merge-weights`, in a process that is none of the launch.

    Raises:
        RuntimeError: It failed.
    """
    from accelerate.test_utils.launching import execute_subprocess_async

    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights", shards, folder, *words]
    execute_subprocess_async(command, env=environment, quiet=True, echo=False)


MERGING = tuple(
    Check("merging", f"{'command' if command else 'function'}, {'safetensors' if safe else 'pickled'}", run)
    for command in (False, True)
    for safe in (True, False)
    for run in [partial(merging, by_command=command, safe=safe)]
)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(MERGING)


if __name__ == "__main__":
    sys.exit(main())
