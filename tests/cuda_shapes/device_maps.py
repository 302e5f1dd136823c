"""What models spread over four GPUs, the CPU and the disk do, on the GPU machine; each function is one task."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.checkpoint.write import write_model_folder
from accel_bigmodel.device_map.check import bytes_to_move
from tests.cuda_shapes.recorder import DRIVER, Recorder, Report

WIDTH, LAYERS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def _expected() -> torch.Tensor:
    with torch.no_grad():
        return build()(inputs())


def _map(places: list[Any]) -> dict[str, Any]:
    return {str(index): places[index * len(places) // LAYERS] for index in range(LAYERS)}


def _passes(model: nn.Module, recorder: Recorder, expected: torch.Tensor, device: str) -> dict[str, Any]:
    """Four forward passes, the last one recorded; whether all were right."""
    report = Report()
    right = []
    x = inputs().to(device)
    with torch.no_grad():
        for _ in range(3):
            right.append(torch.equal(model(x).cpu(), expected))
        with recorder.recording(report):
            output = model(x)
        right.append(torch.equal(output.cpu(), expected))
    return report.as_json() | {"right": all(right), "devices": sorted({str(p.device) for p in model.parameters()})}


def dispatched(places: list[Any], main: str, folder: str) -> dict[str, Any]:
    """`dispatch_model` with an explicit map."""
    expected = _expected()
    with Recorder() as recorder:
        model = dispatch_model(build(), _map(places), main_device=None, offload_dir=folder)
        return _passes(model, recorder, expected, main)


def inferred(folder: str) -> dict[str, Any]:
    """A map of four small GPUs and the rest on the CPU."""
    expected = _expected()
    model = build()
    block = sum(parameter.nbytes for parameter in model[0].parameters())
    limits: dict[Any, int] = {index: 2 * block for index in range(4)} | {"cpu": 100 * block}
    with Recorder() as recorder:
        places = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])
        found = _passes(dispatch_model(model, places), recorder, expected, "cuda:0")
    return found | {"places": sorted({str(place) for place in places.values()})}


def loaded(places: list[Any], folder: str) -> dict[str, Any]:
    """A checkpoint loaded onto several devices."""
    expected = _expected()
    write_model_folder(build().state_dict(), Path(folder) / "model", "20KB")
    with init_empty_weights():
        model = build()
    with Recorder() as recorder:
        load_checkpoint_and_dispatch(model, Path(folder) / "model", _map(places), offload_folder=Path(folder) / "off")
        return _passes(model, recorder, expected, "cuda:1")


def streamed(folder: str) -> dict[str, Any]:
    """All weights in CPU memory, copied to the third GPU by a stream of its own."""
    expected = _expected()
    torch.cuda.set_device(3)
    DRIVER.pretended_reset()
    with Recorder() as recorder:
        model = cpu_offload(build(), torch.device("cuda"))
        model.offload_report()  # type: ignore[operator]  # copies may be timed only once it was asked for
        found = _passes(model, recorder, expected, "cuda:3")
        found["report"] = str(model.offload_report())  # type: ignore[operator]
        del model
        gc.collect()
        torch.cuda.synchronize()
    return found | {"contexts": [index for index in range(8) if DRIVER.pretended_context(index)]}


def loaded_by_threads(folder: str) -> dict[str, Any]:
    """A large checkpoint read by threads, on rank 3 of a machine, to `"cuda"`."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    write_model_folder(nn.Sequential(*layers).state_dict(), Path(folder) / "model", "5MB")
    torch.cuda.set_device(3)
    DRIVER.pretended_reset()
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])
    with Recorder():
        load_checkpoint_in_model(model, Path(folder) / "model", device_map={"": "cuda"})
        right = all(torch.equal(one.weight.cpu(), other.weight) for one, other in zip(model, layers, strict=True))
    return {
        "right": right,
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "contexts": [index for index in range(8) if DRIVER.pretended_context(index)],
    }


def moved_to_the_current_gpu(folder: str) -> dict[str, Any]:
    """What a map to `"cuda"` would move of a model that is there already."""
    model = build().to("cuda:3")
    torch.cuda.set_device(3)
    return {"moved": {str(device): size for device, size in bytes_to_move(model, {"": "cuda"}).items()}}
