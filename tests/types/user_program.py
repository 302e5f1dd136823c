"""What a user writes, and the types that a checker must see in it: `test_user_program.py` has two of them read it, strictly."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

Batch = tuple[torch.Tensor, ...]


class Classifier(nn.Module):
    """A model with a method and an attribute of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.body = nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(inputs))

    def num_weights(self) -> int:
        return self.width * 2


def train(accelerator: Accelerator, epochs: int = 2) -> Classifier:
    set_seed(7)
    model = Classifier(4)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loader: DataLoader[Batch] = DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64)), batch_size=8)
    assert_type(accelerator.prepare(model), Classifier)
    prepared = accelerator.prepare(model, optimizer, loader)
    assert_type(prepared, tuple[Classifier, AdamW, DataLoader[Batch]])
    model, optimizer, loader = prepared
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for inputs, targets in accelerator.skip_first_batches(loader, 1):
            with accelerator.accumulate(model), accelerator.autocast():
                outputs: torch.Tensor = model(inputs)
                loss = criterion(outputs, targets.long())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # pyright: ignore[reportUnknownMemberType] - torch's own
                optimizer.zero_grad()
            assert_type(accelerator.gather(outputs), torch.Tensor)
            assert_type(accelerator.gather_for_metrics((outputs, outputs)), tuple[torch.Tensor, torch.Tensor])
            assert_type(accelerator.reduce({"loss": outputs}, "mean"), dict[str, torch.Tensor])
            assert_type(accelerator.pad_across_processes(outputs, dim=1), torch.Tensor)
        report(accelerator, accelerator.unwrap_model(model).num_weights())
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.save_state()
    return accelerator.unwrap_model(model)


def report(accelerator: Accelerator, weights: int) -> None:
    @accelerator.on_main_process
    def show(text: str) -> str:
        return text.upper()

    assert_type(show("weights"), str)
    with accelerator.split_between_processes(["a", "b"]) as names:
        assert_type(names, list[str])
    accelerator.print(weights)


if __name__ == "__main__":
    run = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        project_config=ProjectConfiguration(project_dir="runs", total_limit=2),
    )
    train(run)
    run.end_training()
