"""How far one call travels through the packages: the files and functions that it enters, traced in a run of a few steps.

uv run python -m tools.walks            prints the table, for one process and for FSDP version 2 on two ranks
uv run python -m tools.walks --write    puts it into docs/architecture.md
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tools.reference import ROOT, run_json, run_on_ranks

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = f"{ROOT}/packages/"
IS_FUNCTION = 1  # of a code object's flags, where bodies of modules and classes have none
ONE, SHARDED = "one process", "FSDP 2, two ranks"
CALLS = {
    "accelerator": "`Accelerator()`",
    "prepare": "`prepare(model, optimizer, loader, scheduler)`",
    "first batch": "first batch",
    "a batch": "a batch",
    "a step": "a step: forward, `backward`, clip, step, `zero_grad`",
    "save_state": "`save_state`",
    "load_state": "`load_state`",
}
Walks = dict[str, list[int]]
"""By call: how many files it enters, and how many functions."""


def measure() -> dict[str, Walks]:
    """The walks of each run."""
    return {
        ONE: run_json(sys.executable, __file__),
        SHARDED: run_on_ranks(sys.executable, __file__, arguments=["--fsdp2"]),
    }


def table(walks: dict[str, Walks]) -> str:
    """The walks as a table of `files / functions`, one column for each run."""
    lines = [f"| call | {' | '.join(walks)} |", "|---" * (len(walks) + 1) + "|"]
    for call, what in CALLS.items():
        cells = [" / ".join(map(str, walks[run][call])) for run in walks]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written() -> dict[str, Walks]:
    """The walks that the page shows."""
    block = re.search(r"<!-- walks -->\n(.*?)\n<!-- end walks -->", PAGE.read_text(), re.DOTALL)
    if block is None:
        raise SystemExit(f"{PAGE} has no section between <!-- walks --> and <!-- end walks -->")
    names = {what: call for call, what in CALLS.items()}
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block[1].strip().splitlines()]
    (_, *runs), _, *body = rows
    walks: dict[str, Walks] = {run: {} for run in runs}
    for what, *cells in body:
        for run, cell in zip(runs, cells, strict=True):
            walks[run][names[what]] = [int(number) for number in cell.split(" / ")]
    return walks


def write(walks: dict[str, Walks]) -> None:
    """Replace the table of the page."""
    block = f"<!-- walks -->\n\n{table(walks)}\n\n<!-- end walks -->"
    PAGE.write_text(re.sub(r"<!-- walks -->.*?<!-- end walks -->", lambda _: block, PAGE.read_text(), flags=re.DOTALL))


# ---- one rank -------------------------------------------------------------------------------------------------------


@contextmanager
def traced(walks: Walks, call: str) -> Iterator[None]:
    """A block whose calls of functions of the packages are counted."""
    functions: set[tuple[str, str]] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & IS_FUNCTION and code.co_filename.startswith(PACKAGES):
            functions.add((code.co_filename, f"{code.co_firstlineno} {code.co_name}"))

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        walks[call] = [len({file for file, _ in functions}), len(functions)]
    if not functions:
        raise SystemExit(
            f"No function under {PACKAGES} was called: the packages that are installed are those of another checkout."
        )


def walk(*, fsdp2: bool) -> Walks:
    """Train a few steps, save and load; the walk of each call, on this rank."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    walks: Walks = {}
    plugin: Any = None
    if fsdp2:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    with traced(walks, "accelerator"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, shuffle=True)
    with traced(walks, "prepare"):
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def step(inputs: torch.Tensor) -> None:
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    batches = iter(loader)
    with traced(walks, "first batch"):
        (batch,) = next(batches)
    step(batch)
    (batch,) = next(batches)
    step(batch)  # optimizers that were not prepared are looked for until now
    with traced(walks, "a batch"):
        (batch,) = next(batches)
    step(batch)
    with traced(walks, "a step"):
        step(batch)
    for (batch,) in batches:
        step(batch)
    folder = [tempfile.mkdtemp(prefix="walks-")]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(folder)
    with traced(walks, "save_state"):
        accelerator.save_state(f"{folder[0]}/checkpoint")
    with traced(walks, "load_state"):
        accelerator.load_state(f"{folder[0]}/checkpoint")
    if accelerator.is_main_process:
        print(json.dumps(walks), flush=True)
    accelerator.end_training()
    return walks


def main() -> None:
    """Measure and print the table; `--write` puts it into the page."""
    walks = measure()
    print(table(walks))
    if "--write" in sys.argv:
        write(walks)


if __name__ == "__main__":
    if __spec__ is None:  # started by its file, as a rank
        walk(fsdp2="--fsdp2" in sys.argv)
    else:
        main()
