"""Checks of seeds and RNG states."""

from __future__ import annotations

import random

import torch

from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Process, checks, same
from accelerate.utils import gather, gather_object, set_seed, synchronize_rng_states


def same_seed(process: Process) -> None:
    """One seed gives identical numbers on all processes."""
    set_seed(7)
    numbers = gather_object([(random.random(), torch.rand(1).item())])
    same(len(set(numbers)), 1, f"different numbers in {numbers}")


def seed_of_each_process(process: Process) -> None:
    """With device_specific, each process has different numbers."""
    set_seed(7, device_specific=True)
    numbers = gather_object([torch.rand(1).item()])
    same(len(set(numbers)), process.world, f"different numbers in {numbers}")


def synchronising(process: Process) -> None:
    """RNG states are broadcast from rank 0: torch's, the device's and that of a generator."""
    torch.manual_seed(process.rank)
    generator = torch.Generator().manual_seed(process.rank)
    device = PartialState().device
    kinds = ["torch", "generator"]
    if device.type == "cuda":
        torch.cuda.manual_seed(process.rank)
        kinds.append("cuda")
    synchronize_rng_states(kinds, generator=generator)
    numbers = torch.cat([torch.rand(2), torch.rand(2, generator=generator), torch.rand(2, device=device).cpu()])
    rows = gather(numbers[: 6 if "cuda" in kinds else 4].to(device).unsqueeze(0)).tolist()
    same([row == rows[0] for row in rows], [True] * process.world, f"equal to rank 0's in {rows}")


RANDOMNESS = checks(
    "random numbers", one_seed=same_seed, device_specific=seed_of_each_process, synchronize=synchronising
)
