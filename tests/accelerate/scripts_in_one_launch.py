"""Run by a launch: several bundled scripts, one after the other, each as a program; says how each ended.

The first argument is a file with a line for each: its name and its arguments.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.test_utils import path_in_accelerate_package


def run(words: list[str], store: str) -> Any:
    """Run one script in a process group of its own; returns its exit status."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    sys.argv = words
    try:
        runpy.run_path(str(path_in_accelerate_package("test_utils", "scripts", words[0])), run_name="__main__")
    except SystemExit as end:
        return end.code
    return "it did not exit"


if __name__ == "__main__":
    given = Path(sys.argv[1])
    ended = [run(line.split(), f"{given}.{number}") for number, line in enumerate(given.read_text().splitlines())]
    PartialState._reset_state()
    if os.environ["RANK"] == "0":
        print("\nENDED " + json.dumps(ended), flush=True)  # noqa: T201 - the test reads it
