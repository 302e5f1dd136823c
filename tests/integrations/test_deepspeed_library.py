"""What reaches DeepSpeed as it was written, and what its engine keeps by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from tests.integrations.test_deepspeed import (
    ADAM,
    config_of,
    deepspeed_ranks,
    make_llama,
    new_loader,
    new_model,
    prepared,
    run_with,
    train,
)

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")  # importing it takes seconds
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 20}}


@deepspeed_ranks(2)
def test_schedulers_of_the_engine_are_stored_by_it(rank: int, world: int, tmp_path: Path) -> None:
    def start(accelerator: Accelerator) -> tuple[Any, ...]:
        model = new_model()
        optimizer = DummyOptim(model.parameters(), lr=0.01)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, new_loader(), DummyScheduler(optimizer)
        )
        return model, optimizer, loader, scheduler

    config = config_of(2, optimizer=ADAM, scheduler=WARMUP)
    with run_with(DeepSpeedPlugin(hf_ds_config=config)) as accelerator:
        parts = start(accelerator)
        train(accelerator, *parts)
        accelerator.save_state(tmp_path / "saved")
        assert not (tmp_path / "saved" / "scheduler.bin").exists()  # accelerate 1.15 neither writes nor looks for one
        expected = [train(accelerator, *parts), parts[-1].get_last_lr()]
    with run_with(DeepSpeedPlugin(hf_ds_config=config)) as accelerator:
        parts = start(accelerator)
        accelerator.load_state(tmp_path / "saved")
        assert [train(accelerator, *parts), parts[-1].get_last_lr()] == expected


@pytest.mark.takes_turns
@deepspeed_ranks(2)
def test_schedulers_of_the_program_have_a_file(rank: int, world: int, tmp_path: Path) -> None:
    with run_with(DeepSpeedPlugin(zero_stage=2)) as accelerator:
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, new_loader(), scheduler)
        train(accelerator, model, optimizer, loader, scheduler)
        rate = scheduler.get_last_lr()
        accelerator.save_state(tmp_path)
        scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": [7.0]})
        accelerator.load_state(tmp_path)
        assert scheduler.get_last_lr() == rate


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_settings_that_only_deepspeed_knows_reach_it(rank: int, world: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    zero = {"zero_hpz_partition_size": 2, "stage3_max_live_parameters": 12345, "round_robin_gradients": True}
    config = config_of(3, zero=zero, wall_clock_breakdown=True)
    curves = []
    for one in (config_of(3), config):
        with run_with(DeepSpeedPlugin(hf_ds_config=one)) as accelerator:
            model, optimizer, loader = prepared(accelerator)
            curves.append(train(accelerator, model, optimizer, loader))
            if one is config:
                actual = model._config.zero_config
                seen = (actual.zero_hpz_partition_size, actual.max_live_parameters, actual.round_robin_gradients)
                assert seen == tuple(zero.values())
                assert model.wall_clock_breakdown()
                assert accelerator.deepspeed_config["zero_optimization"] == {"stage": 3, **zero}
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)

    quantised = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(3, zero=dict.fromkeys(quantised, True)))
    plugin.deepspeed_config_process(must_match=False)
    actual = DeepSpeedConfig(plugin.deepspeed_config).zero_config  # the operations themselves are for GPUs
    assert all(getattr(actual, name) is True for name in quantised)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 2])
@deepspeed_ranks(2)
def test_layers_are_sharded_by_deepspeed(rank: int, world: int, stage: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (8, 6), generator=generator)]
    loader = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]

    def step_through(model: Any, optimizer: Any, batches: Any, backward: Any) -> list[float]:
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = make_llama()
    expected = step_through(plain, torch.optim.SGD(plain.parameters(), lr=0.5), loader, torch.Tensor.backward)

    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    config = {"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": 2}, **sizes}
    with run_with(DeepSpeedPlugin(hf_ds_config={**config, "gradient_clipping": 0.0})) as accelerator:
        model = make_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
        assert model.module.model.layers[0].mlp.up_proj.weight.shape == (16, 16)
        assert len(batches) == len(loader)  # ranks of a TP group read the same samples
        assert step_through(model, optimizer, batches, accelerator.backward) == pytest.approx(expected, abs=1e-4)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, tmp_path)
        if rank == 0:
            assert state.keys() == plain.state_dict().keys()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)
            make_llama().config.save_pretrained(tmp_path)
            loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
            assert torch.equal(loaded.lm_head.weight, state["lm_head.weight"])
        else:
            assert state == {}


ALONE = """
import sys
import torch
from accelerate import Accelerator, DeepSpeedPlugin

sizes = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "checkpoint": {"load_universal": True}}
accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=sizes))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
accelerator.load_state(sys.argv[1])
for inputs, targets in loader:
    loss = (model(inputs) - targets).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    print("loss:", loss.item())
accelerator.end_training()
"""


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_a_converted_checkpoint_resumes_with_another_number_of_ranks(rank: int, world: int, tmp_path: Path) -> None:
    with run_with(DeepSpeedPlugin(hf_ds_config=config_of(2))) as accelerator:
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, new_loader())
        train(accelerator, model, optimizer, loader)
        accelerator.save_state(tmp_path / "saved")
        expected = train(accelerator, model, optimizer, loader)
        if rank == 0:
            (tmp_path / "alone.py").write_text(ALONE)
            parts = shutil.ignore_patterns("pytorch_model", "manifest.json")
            shutil.copytree(tmp_path / "saved", tmp_path / "copy", ignore=parts)
            folders = ["--input_folder", tmp_path / "saved" / "pytorch_model"]
            folders += ["--output_folder", tmp_path / "copy" / "pytorch_model"]
            conversion = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders]
            kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "OMP_NUM_THREADS")}
            kept |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_SHM_COMM": "0"}
            for command in (conversion, [tmp_path / "alone.py", tmp_path / "copy"]):
                done = subprocess.run(
                    [sys.executable, *command], env=kept, capture_output=True, text=True, check=False, timeout=300
                )
                assert done.returncode == 0, done.stderr
            actual = [float(line[6:]) for line in done.stdout.splitlines() if line.startswith("loss: ")]
            assert actual == pytest.approx(expected, abs=1e-5)
        accelerator.wait_for_everyone()
