"""What a GPU adds to the figures: weights that are copied while it computes, loading, steps, a compiled language model.

    PYTHONPATH=. python tools/bench/gpu.py          # on a machine with a GPU; about five minutes on one H100
    PYTHONPATH=. python tools/bench/gpu.py --tiny   # the same code on the CPU, whose figures mean nothing

Prints rows for docs/performance.md. The floor of a forward pass with offloaded weights is what it takes with all weights on
the GPU, or what the copied bytes take at the speed of copies from pinned memory, measured in the same process, whichever is
longer.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.load import load_checkpoint_in_model
from accel_bigmodel.checkpoint.write import write_model_folder
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import cpu_offload, dispatch_model
from accel_bigmodel.empty import init_empty_weights
from tools.bench.gpu_training import training_rows
from tools.bench.row import Row, table


@dataclass(frozen=True)
class Scale:
    """How large the measured model is: blocks of linear layers, in bfloat16.

    Attributes:
        device: "cuda", or "cpu" to try the code.
        width: Features.
        blocks: Blocks.
        per_block: Layers of a block.
        copy_bytes: The size of the copy that shows the speed of the bus.
        repeats: How often each figure is taken; the best one counts.
        layers: Of the language model; None for that of a billion parameters.
    """

    device: str = "cuda"
    width: int = 8192
    blocks: int = 20
    per_block: int = 4
    copy_bytes: int = 1 << 30
    repeats: int = 5
    layers: int | None = None

    @property
    def place(self) -> Any:
        """The key of device maps."""
        return 0 if self.device == "cuda" else "cpu"


TINY = Scale("cpu", width=64, blocks=3, per_block=2, copy_bytes=1 << 20, repeats=1, layers=1)


class Block(nn.Module):
    """A few layers that stay together."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(scale.width, scale.width, bias=False) for _ in range(scale.per_block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them, each beside a shortcut."""
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.01
        return x


def build(scale: Scale) -> nn.Module:
    """The model, on the default device."""
    return nn.Sequential(*[Block(scale) for _ in range(scale.blocks)]).to(torch.bfloat16).requires_grad_(False)


def seconds(scale: Scale, function: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs, with nothing left to do on the GPU."""
    taken = []
    for _ in range(scale.repeats):
        synchronize(scale)
        begin = time.perf_counter()
        function(*arguments)
        synchronize(scale)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def synchronize(scale: Scale) -> None:
    """Wait for the GPU."""
    if scale.device == "cuda":
        torch.cuda.synchronize()


def bus_speed(scale: Scale) -> float:
    """Bytes per second from pinned memory to the GPU."""
    host = torch.empty(scale.copy_bytes, dtype=torch.uint8, pin_memory=scale.device == "cuda")
    here = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=scale.device)
    return scale.copy_bytes / seconds(scale, lambda: here.copy_(host, non_blocking=True))


def offload_rows(scale: Scale) -> Iterator[Row]:
    """Forward passes with budgets of GPU memory, and loading."""
    speed = bus_speed(scale)
    with torch.device(scale.device):
        resident = build(scale)
    inputs = {batch: torch.randn(batch, scale.width, dtype=torch.bfloat16, device=scale.device) for batch in (1, 64)}
    with torch.no_grad():
        computing = {batch: seconds(scale, resident, x) for batch, x in inputs.items()}
        expected = {batch: resident(x).cpu() for batch, x in inputs.items()}
    total = sum(parameter.nbytes for parameter in resident.parameters())
    on_cpu = resident.to("cpu")
    del resident
    for share in (0, 50):
        model, on_gpu = offloaded(scale, copy.deepcopy(on_cpu), share, total)
        for batch, x in inputs.items():
            with torch.no_grad():
                for _ in range(3):
                    output = model(x)
                if not torch.equal(output.cpu(), expected[batch]):
                    raise SystemExit("another result than with all weights on the GPU")
                taken = seconds(scale, model, x)
            floor = max(computing[batch], (total - on_gpu) / speed)
            what = f"forward pass, batch {batch}, {share} % of {total / 1e9:.0f} GB on the GPU"
            yield Row(what, "ms", taken * 1e3, None, floor * 1e3, taken / floor, 1.10)
        del model
    yield loading_row(scale, on_cpu, total, speed)


def offloaded(scale: Scale, model: nn.Module, share: int, total: int) -> tuple[nn.Module, int]:
    """The model with a share of its bytes on the GPU, and how many these are."""
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    if share:
        limits = (
            {scale.place: total * share // 100, "cpu": 2 * total} if scale.device == "cuda" else {"cpu": total * 2}
        )
        dispatch_model(
            model, infer_auto_device_map(model, limits, no_split_module_classes=["Block"]), force_hooks=True
        )
    else:
        cpu_offload(model, torch.device(scale.device))
    return model, sum(parameter.nbytes for parameter in model.parameters() if parameter.is_cuda)


def loading_row(scale: Scale, model: nn.Module, total: int, speed: float) -> Row:
    """A checkpoint in the page cache to the GPU, against the slower of reading and copying."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(model.state_dict(), Path(folder), "2GB")
        begin = time.perf_counter()
        for path in Path(folder).glob("*.safetensors"):
            path.read_bytes()
        reading = total / (time.perf_counter() - begin)
        with init_empty_weights():
            empty = build(scale)
        taken = seconds(scale, lambda: load_checkpoint_in_model(empty, folder, device_map={"": scale.place}))
    floor = total / min(reading, speed)
    return Row(f"load {total / 1e9:.0f} GB to the GPU", "s", taken, None, floor, taken / floor, 1.25)


def rows(scale: Scale) -> Iterator[Row]:
    """All figures, as they come."""
    yield from offload_rows(scale)
    yield from training_rows(scale.device, scale.layers)


def main(arguments: list[str]) -> int:
    """Print the table; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="try the code on the CPU")
    options = parser.parse_args(arguments)
    found = []
    for row in rows(TINY if options.tiny else Scale()):
        found.append(row)
        print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    name = "the CPU: these figures mean nothing" if options.tiny else torch.cuda.get_device_name(0)
    print(f"On {name}, torch {torch.__version__}.\n\n{table(found)}")
    return 0 if options.tiny else int(not all(row.met for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
