"""A run that is stopped and resumed with a real `Accelerator` ends where the uninterrupted one does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.files.tensor_files import read_tensors
from accel_state.libraries import is_torchdata_stateful_dataloader_available
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from tests.support.ranks import ranks


class Run:
    """A small training run, on one process or several."""

    def __init__(self, folder: Path, seed: int, dropout: float = 0.5, **loading: Any) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **loading),
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        )
        set_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
        data = torch.arange(64.0).reshape(16, 4)
        loader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    def train(self, batches: Iterator[Any], count: int) -> None:
        for _, (batch,) in zip(range(count), batches, strict=False):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def epoch(self) -> None:
        self.train(iter(self.loader), 1000)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_resuming_between_epochs(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1)
    run.epoch()
    run.accelerator.save_state()
    run.epoch()
    resumed = Run(tmp_path, seed=2)
    resumed.accelerator.load_state()
    assert resumed.accelerator.save_iteration == 1
    resumed.epoch()
    assert_same(run.weights(), resumed.weights())


def test_saves_under_names_of_ones_own_are_counted_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for count in (1, 2):
        accelerator.save_state(tmp_path / "own")
        assert accelerator.save_iteration == count


def test_resuming_within_an_epoch(tmp_path: Path) -> None:
    # starting an iterator draws a random number, which an uninterrupted run did earlier: so no dropout
    run = Run(tmp_path, seed=1, dropout=0.0, use_stateful_dataloader=True)
    batches = iter(run.loader)
    run.train(batches, 3)
    run.accelerator.save_state()
    run.train(batches, 1000)
    resumed = Run(tmp_path, seed=2, dropout=0.0, use_stateful_dataloader=True)
    resumed.accelerator.load_state()
    resumed.epoch()
    assert_same(run.weights(), resumed.weights())


@ranks(2)
@pytest.mark.parametrize("stateful", [False, True])
def test_resuming_on_ranks(rank: int, stateful: bool, tmp_path: Path) -> None:
    dropout = 0.0 if stateful else 0.5  # see above
    run = Run(tmp_path, seed=1, dropout=dropout, use_stateful_dataloader=stateful)
    torch.manual_seed(rank)  # dropout differs between the processes
    run.epoch()
    run.accelerator.save_state()
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    assert sorted(read_tensors(folder / "model.safetensors")) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    positions = ["dl_state_dict.bin", "dl_state_dict_rank1.bin"]
    has_positions = stateful and is_torchdata_stateful_dataloader_available()
    assert sorted(name for name in os.listdir(folder) if name.startswith("dl_")) == (
        positions if has_positions else []
    )
    run.epoch()
    resumed = Run(tmp_path, seed=7, dropout=dropout, use_stateful_dataloader=stateful)
    resumed.accelerator.load_state()
    resumed.epoch()
    assert_same(run.weights(), resumed.weights())


def test_the_loss_scale_of_mixed_precision_is_kept(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = nn.Linear(2, 2), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2)).sum())
    optimizer.step()
    accelerator.scaler.update(512.0)
    accelerator.save_state(tmp_path / "state")
    assert "scaler.pt" in os.listdir(tmp_path / "state")
    accelerator.scaler.update(2.0)
    accelerator.load_state(tmp_path / "state")
    assert accelerator.scaler.get_scale() == 512.0


def test_models_and_objects_are_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, tmp_path / "model")
    assert sorted(read_tensors(tmp_path / "model" / "model.safetensors")) == ["bias", "weight"]
    accelerator.save(model.state_dict(), tmp_path / "weights.safetensors", safe_serialization=True)
    assert sorted(read_tensors(tmp_path / "weights.safetensors")) == ["bias", "weight"]
    seen = []
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(len(weights)))
    accelerator.save_state(tmp_path / "state")
    handle.remove()
    accelerator.save_state(tmp_path / "state")
    assert seen == [1]


def torchs_optimizers() -> list[str]:
    return [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]


OTHER_OPTIMIZERS = [
    ("transformers.optimization", "Adafactor", {}),
    ("pytorch_optimizer", "Lion", {}),
    ("pytorch_optimizer", "Prodigy", {}),
    ("pytorch_optimizer", "SOAP", {}),
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.1}),
]


@pytest.mark.parametrize(
    ("library", "name", "options"), [*(("torch.optim", name, {}) for name in torchs_optimizers()), *OTHER_OPTIMIZERS]
)
def test_every_optimizer_steps_on_as_if_it_had_not_stopped(
    library: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    kind = getattr(pytest.importorskip(library), name)
    data = torch.tensor([[0, 1], [2, 3], [1, 2]]) if name == "SparseAdam" else torch.randn(3, 2, 4)

    def build(seed: int) -> tuple[Accelerator, nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Embedding(4, 4, sparse=True) if name == "SparseAdam" else nn.Linear(4, 4, bias=False)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, kind(model.parameters(), **options))

    def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            return loss

        optimizer.train()  # as schedule-free ones ask for
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    whole, stopped = build(1), build(1)
    for batch in data:
        step(*whole, batch)
    for batch in data[:2]:
        step(*stopped, batch)
    stopped[0].save_state(tmp_path / "state")
    resumed = build(2)
    resumed[0].load_state(tmp_path / "state")
    step(*resumed, data[2])
    assert_same(list(whole[1].parameters()), list(resumed[1].parameters()))


class Count:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_second_fold_is_trained_and_saved_as_the_first(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    everywhere = Count()
    accelerator.register_for_checkpointing(everywhere)

    def fold(folder: Path) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        progress = Count()
        accelerator.register_for_checkpointing(progress)
        scale = accelerator.scaler.get_scale()
        accelerator.backward(model(torch.ones(1, 2)).sum())  # outside of accumulate(): a step for each batch
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(folder)
        with accelerator.accumulate(model):  # and one window that is left open
            accelerator.backward(model(torch.full((1, 2), 1e30)).sum())
            optimizer.step()
        accelerator.scaler.update(4.0)
        return [weight.detach().clone() for weight in model.parameters()], scale

    (first, first_scale), _ = fold(tmp_path / "first"), accelerator.free_memory()
    second, second_scale = fold(tmp_path / "second")
    assert_same(first, second)
    assert first_scale == second_scale
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "second")]
    assert files[0] == files[1]
    assert "custom_checkpoint_1.pkl" in files[1]
    assert accelerator._custom_objects[0] is everywhere
