"""`accelerate estimate-memory --training`: a step without values against a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_cli.estimate.batches import BATCHES, Batch, BatchSize
from accel_cli.estimate.building import build
from accel_cli.estimate.live_memory import LiveMemory
from accel_cli.estimate.source import find_model
from accel_cli.estimate.training import StepSettings, measure_fake
from accel_cli.estimate.training_report import ACTIVATIONS, BACKWARD, FORWARD, GRADIENTS, OPTIMIZER, PARAMETERS
from accel_cli.main import main
from tests.cli.estimated import allocated, model_folder
from tests.cli.running import refusal


def fake(folder: str, settings: StepSettings, size: BatchSize) -> Any:
    source = find_model(folder)
    return measure_fake(lambda: build(source), lambda m: BATCHES[source.library or ""](m, size), settings)


@pytest.mark.takes_turns
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"mixed_precision": "bf16", "optimizer": "sgd-momentum"}),
        ("llama", {"gradient_checkpointing": True, "optimizer": "sgd"}),
        ("gpt2", {"optimizer": "adafactor"}),
        ("gpt2", {"mixed_precision": "fp16"}),
        ("bert", {"optimizer": "adam"}),
        ("bert", {"mixed_precision": "bf16", "optimizer": "rmsprop"}),
        ("headless", {"optimizer": "adagrad"}),
        ("t5", {}),
        ("vit", {}),
    ],
)
def test_a_step_without_values_needs_what_a_real_one_allocates(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = model_folder(tmp_path, kind)
    wanted = StepSettings(**settings, as_on_gpu=False)
    size = BatchSize(2, None if kind == "vit" else 48)
    _, step = fake(folder, wanted, size)
    real = allocated(folder, wanted, size)
    # what is recomputed in the backward pass lives a little longer without values; CPUs with matrix units lay 16-bit values
    # out in their own way, which takes memory for a moment
    near = 0.08 if wanted.gradient_checkpointing else 0.01 if wanted.mixed_precision == "no" else 0.03
    assert [phase.peak_bytes for phase in step.phases] == pytest.approx(real, rel=near)


@pytest.mark.thorough
def test_image_models_of_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    folder = model_folder(tmp_path, "resnet")
    wanted, size = StepSettings(as_on_gpu=False), BatchSize(2)
    _, step = fake(folder, wanted, size)
    # convolutions on the CPU use memory of their own, which is not seen
    assert [phase.peak_bytes for phase in step.phases] == pytest.approx(allocated(folder, wanted, size), rel=0.08)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))


def batch_of_five(model: nn.Module) -> Batch:
    return Batch(torch.sum, args=(torch.zeros(5, 8),))


def measured(model: Any, batch: Any, **settings: Any) -> tuple[Any, Any]:
    """The states of a model, and a step."""
    return measure_fake(model, batch, StepSettings(**settings))


def test_the_kinds_of_memory_add_up() -> None:
    states, step = measured(two_layers, batch_of_five)
    num_values = 8 * 16 + 16 + 16 + 1
    assert (states.parameters, states.gradients, states.buffers) == (4 * num_values, 4 * num_values, 0)
    assert states.optimizer == 2 * 4 * num_values + 4 * 4  # two moments, and a step counter for each tensor
    for phase in step.phases:
        assert phase.at_peak[PARAMETERS] == 4 * num_values
        assert phase.at_peak[OPTIMIZER] == states.optimizer
        assert phase.at_peak.get(GRADIENTS, 0) == 0 or phase.name != FORWARD
    assert {phase.name: phase for phase in step.phases}[BACKWARD].at_end[GRADIENTS] == 4 * num_values


def test_dropout_keeps_a_byte_for_each_value_on_a_gpu() -> None:
    (_, cpu), (_, gpu) = (measured(two_layers, batch_of_five, as_on_gpu=where) for where in (False, True))
    assert cpu.activations - gpu.activations == (4 - 1) * 5 * 16


def test_attention_with_dropout_is_fused_on_a_gpu() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.proj = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.proj(x)).view(5, 1, 16, 8)
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    def batch(model: nn.Module) -> Batch:
        return Batch(torch.sum, args=(torch.zeros(80, 8),))

    (_, cpu), (_, gpu) = (measured(Block, batch, as_on_gpu=where) for where in (False, True))
    assert gpu.activations < cpu.activations - 4 * 5 * 16 * 16  # no matrix of attention weights
    (_, cpu), (_, gpu) = (measured(Block, batch, mixed_precision="bf16", as_on_gpu=where) for where in (False, True))
    assert gpu.phases[0].at_peak[ACTIVATIONS] != cpu.phases[0].at_peak[ACTIVATIONS]


def test_autocast_keeps_copies_of_weights() -> None:
    _, step = measured(two_layers, batch_of_five, mixed_precision="bf16")
    assert step.weight_copies == 2 * 16  # of the last layer; the input of the first one needs no gradient


def test_live_memory_counts_real_tensors_once_and_forgets_what_is_gone() -> None:
    with LiveMemory() as memory:
        first = torch.zeros(100)
        view = first[10:]
        with memory.during("adding") as phase:
            second = first + 1
            del second
        assert phase.at_peak == {ACTIVATIONS: 800}
        assert phase.at_end == {ACTIVATIONS: 400}
        del first
        assert memory.live[ACTIVATIONS] == 400
        memory.call(view, PARAMETERS)
        assert memory.live == {ACTIVATIONS: 0, PARAMETERS: 400}
        del view
    assert memory.live[PARAMETERS] == 0


def test_questions_about_values_have_harmless_answers() -> None:
    with FakeTensorMode(), LiveMemory():
        tokens = torch.zeros(3, dtype=torch.long)
        assert (tokens == 1).all()  # no padding
        assert not (tokens >= 100).any()  # nothing out of range
        assert tokens.max().item() == 1
        assert torch.rand(4).sum().item() == 1.0


@pytest.mark.takes_turns
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_mixtures_of_experts_and_multiple_choice(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    choosing = model_folder(tmp_path, "bert", architectures=["BertForMultipleChoice"])
    for folder in (model_folder(tmp_path, "mixtral"), choosing):
        _, step = fake(folder, StepSettings(mixed_precision=precision), BatchSize(2, 16))
        assert step.activations > 0


@pytest.mark.takes_turns
def test_texts_against_images(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, small = fake(model_folder(tmp_path, "clip"), StepSettings(), BatchSize(1, 16))
    _, large = fake(model_folder(tmp_path, "clip"), StepSettings(), BatchSize(4, 16))
    assert large.activations > 3 * small.activations


def test_a_step_that_depends_on_values_is_refused() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    with pytest.raises(ValueError, match="cannot run on fake tensors"):
        measure_fake(lambda: Picky(8, 1), batch_of_five, StepSettings())


@pytest.mark.takes_turns
def test_the_command_prints_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = model_folder(tmp_path, "llama")
    words = ["estimate-memory", folder, "--training", "--sequence-length", "16", "--mixed_precision", "bf16"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Training step with adamw, batch size 1, 16 tokens, bf16" in said
    assert "peak, backward pass" in said
    steps = []
    for more in ([], ["--batch_size", "8"], ["--batch_size", "8", "--gradient_checkpointing"]):
        assert main([*words, "--json", *more]) == 0
        steps.append(json.loads(capsys.readouterr().out)["training"])
    small, large, checkpointed = (step["activations_bytes"] for step in steps)
    assert large > 5 * small
    assert checkpointed < large / 2
    assert steps[0]["peak_bytes"] == max(phase["peak_bytes"] for phase in steps[0]["phases"])


def test_all_text_fits_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = model_folder(tmp_path, "gpt2")
    said = refusal(capsys, "estimate-memory", folder, "--training", "--sequence_length", "129")
    assert "takes at most 128 tokens" in said
    assert main(["estimate-memory", folder, "--training"]) == 0
