"""Launched by `test_devices_of_vendors.py`: trains on a played device of each name, in a fork for each."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import: once here rather than in each fork
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.random import capture_rng_state, restore_rng_state
from accel_state.devices import device_kind
from accelerate import Accelerator
from accelerate.utils import gather_object, release_memory, set_seed
from tests.support.played_device import play


def train(accelerator: Accelerator, folder: Path) -> tuple[list[float], nn.Module]:
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        assert x.device.type == accelerator.device.type
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).item())
    accelerator.save_model(model, str(folder / "model"))
    return losses, model


def on_device(name: str, folder: Path) -> None:
    driver = play(name)  # before anything has gone backward: torch counts devices then
    kind = device_kind(name)
    on_cpu = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain, _ = train(on_cpu, folder / f"instead of {name}")
    on_cpu.state._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="no")
    assert accelerator.device.type == name, accelerator.device
    losses, model = train(accelerator, folder / name)
    assert max(abs(one - other) for one, other in zip(losses, plain, strict=True)) < 1e-5, (losses, plain)
    assert next(model.parameters()).device.type == name
    assert driver.seed == 0
    weights = load_file(folder / name / "model" / "model.safetensors")
    assert torch.equal(weights["0.weight"], next(model.parameters()).detach().cpu())
    states = capture_rng_state()
    set_seed(5)
    assert driver.seed == 5
    restore_rng_state(states)
    assert driver.seed == 0
    assert gather_object(["one"]) == ["one"]
    release_memory(model)
    kind.synchronize()
    assert {"empty_cache", "synchronize"} <= set(driver.calls)
    assert kind.supports_bf16()
    with accelerator.autocast():
        pass


def main(folder: str, names: list[str]) -> int:
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                on_device(name, Path(folder))
            except BaseException:
                traceback.print_exc()
                sys.stderr.write(f"{name} failed\n")
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return 1
        sys.stdout.write(f"trained on {name}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
