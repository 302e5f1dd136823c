"""Checkpoints inside a gradient accumulation window hold the gradients of its micro-batches so far."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.training_state.window import Window, check_window, read_window
from accel_ops.modules import full_tensor
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from tests.support.ranks import POOL, ranks

STEPS = 4
SAMPLES = torch.arange(32.0).view(16, 2) / 10  # of two windows
WEIGHTS = [1.0, 3.0, 2.0, 5.0, 4.0, 1.0, 2.0, 2.0]


class Training:
    """Two windows of four micro-batches, every process with its share of each global micro-batch of two samples."""

    def __init__(self, average_over: Any, **settings: Any) -> None:
        AcceleratorState._reset_state()
        plugin = GradientAccumulationPlugin(num_steps=STEPS, average_over=average_over)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **settings)
        self.weighted = average_over == "weights"
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run(self, first: int, last: int) -> None:
        accelerator = self.accelerator
        for index in range(first, last):
            own = SAMPLES[2 * index : 2 * index + 2].chunk(accelerator.num_processes)[accelerator.process_index]
            with accelerator.accumulate(self.model):
                weight = {"weight": WEIGHTS[index] * len(own)} if self.weighted else {}
                accelerator.backward(self.model(own).square().mean(), **weight)
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def values(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in full_tensor(parameter).flatten().tolist()]


def part(folder: str, average_over: str, first: int, last: int) -> None:
    """Micro-batches `first` to `last`, from the checkpoint of those before and into a new one."""
    training = Training(average_over)
    if first:
        training.accelerator.load_state(f"{folder}/{first}")
        assert not training.accelerator.sync_gradients
    training.run(first, last)
    training.accelerator.save_state(f"{folder}/{last}")
    if training.accelerator.is_main_process:
        (Path(folder) / f"{last}.json").write_text(json.dumps(training.values))


part.body = part  # type: ignore[attr-defined]


@pytest.mark.takes_turns
@pytest.mark.filterwarnings("ignore:The checkpoint .* was saved with num_processes")
@pytest.mark.parametrize("average_over", ["steps", "window", "weights"])
@pytest.mark.parametrize("worlds", [(1, 1, 1), (2, 2, 2), (2, 1, 2), (1, 2, 1)])
def test_a_window_goes_on_on_any_number_of_processes(
    average_over: str, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    def run(world: int, first: int, last: int) -> None:
        values = {"folder": str(tmp_path), "average_over": average_over, "first": first, "last": last}
        POOL.run(part, world, values, 60)

    run(1, 0, 8)
    whole = json.loads((tmp_path / "8.json").read_text())
    for world, first, last in zip(worlds, (0, 2, 5), (2, 5, 8), strict=True):  # 2 and 5 are inside windows
        run(world, first, last)
    assert json.loads((tmp_path / "8.json").read_text()) == pytest.approx(whole, abs=1e-6)


def test_a_checkpoint_without_a_window_closes_the_one_that_is_open(tmp_path: Path) -> None:
    training = Training("steps")
    training.run(0, 4)
    training.accelerator.save_state(tmp_path / "between")
    assert not list((tmp_path / "between").glob("accumulated_gradients*"))
    after = list(training.values)
    training.run(4, 6)
    training.accelerator.load_state(tmp_path / "between")
    assert training.accelerator.sync_gradients
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.values == after
    training.run(4, 8)
    again = Training("steps")
    again.run(0, 8)
    assert training.values == again.values


def test_gradients_that_do_not_fit_are_refused() -> None:
    engine: Any = SimpleNamespace(accumulates_in_grad=True)
    models = [nn.Linear(2, 1)]
    window = Window({"0.weight": torch.zeros(3, 3)}, {})
    with pytest.raises(ValueError, match=r"gradient of shape \[3, 3\] for '0.weight', which has shape \[1, 2\] here"):
        check_window(window, engine, models, "the checkpoint")
    with pytest.raises(ValueError, match="'1.weight', which does not exist here"):
        check_window(Window({"1.weight": torch.zeros(1, 2)}, {}), engine, models, "the checkpoint")
    check_window(Window({"0.weight": torch.zeros(1, 2)}, {}), engine, models, "the checkpoint")
    for damaged in ({"gradients": [1], "average": {}}, {"gradients": {"0.weight": 1}, "average": {}}, {}):
        with pytest.raises(ValueError, match="'accumulated_gradients_0.bin' is damaged"):
            read_window({"accumulated_gradients_0.bin"}, {"accumulated_gradients_0.bin": damaged}.__getitem__, 0, 1, 1)


def test_an_engine_that_keeps_gradients_elsewhere_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("steps")
    monkeypatch.setattr(type(training.accelerator.engine), "accumulates_in_grad", False)
    training.run(0, 2)
    with pytest.warns(UserWarning, match="inside a gradient accumulation window"):
        training.accelerator.save_state(tmp_path / "state")
    assert not list((tmp_path / "state").glob("accumulated_gradients*"))


def test_a_window_that_cannot_be_loaded_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training("steps")
    training.run(0, 2)
    training.accelerator.save_state(tmp_path / "state")
    other = Training("steps")
    monkeypatch.setattr(type(other.accelerator.engine), "accumulates_in_grad", False)
    with pytest.warns(UserWarning, match="'single' engine cannot load the gradients of an accumulation window"):
        other.accelerator.load_state(tmp_path / "state")
    assert all(parameter.grad is None for parameter in other.model.parameters())


@pytest.mark.takes_turns
@ranks(2)
def test_sharded_models_say_that_they_go_on_without_the_window(rank: int, world: int, tmp_path: Path) -> None:
    def fsdp2() -> Training:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
        return Training("steps", fsdp_plugin=plugin)

    def said(call: Callable[[], Any]) -> int:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            call()
        return sum("accumulation window" in str(each.message) for each in heard)

    whole = Training("steps")
    whole.run(0, 2)
    whole.accelerator.save_state(tmp_path / "ddp")
    training = fsdp2()
    training.run(0, 2)
    assert said(lambda: training.accelerator.save_state(tmp_path / "fsdp2")) == (rank == 0)
    assert not list((tmp_path / "fsdp2").glob("accumulated_gradients*"))
    training.run(2, 8)
    again = fsdp2()
    assert said(lambda: again.accelerator.load_state(tmp_path / "ddp")) == (rank == 0)
    again.run(2, 8)
    assert again.accelerator.sync_gradients
    plain = Training("steps")
    assert not said(lambda: plain.accelerator.load_state(tmp_path / "fsdp2"))
