"""Tests see no GPU or other accelerator, unless the run names nothing but `tests/gpu`.

So a test has the same result on machines with one GPU, with eight and with none. What needs a GPU is in `tests/gpu`, and runs
by `uv run pytest tests/gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = ROOT / "tests/gpu"
# The variables of `accel_state.devices`, without that of torch_xla, whose tests choose its CPU runtime. They stand here again,
# because the table loads torch; a test compares the two.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "MLU_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "SDAA_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "NEURON_RT_VISIBLE_CORES",
)
NO_DEVICES = dict.fromkeys(VARIABLES, "")
"""The environment variables of a process that sees no device."""


def is_about_gpus(names: Sequence[str]) -> bool:
    """Whether a run names nothing but `tests/gpu` and what is in it.

    Args:
        names: The paths and test IDs of the command line.
    """
    paths = [Path(name.partition("::")[0]).resolve() for name in names]
    return bool(paths) and all(path == GPU_TESTS or GPU_TESTS in path.parents for path in paths)


def hide_from(names: Sequence[str]) -> None:
    """Hide all devices from this process and its children, unless the run is about GPUs.

    Args:
        names: The paths and test IDs of the command line.
    """
    if not is_about_gpus(names):
        os.environ.update(NO_DEVICES)


def with_all_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment that hides no device."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}
