"""DeepSpeed, real, on the CPU: what an accelerator makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DeepSpeedSequenceParallelConfig,
    DummyOptim,
    DummyScheduler,
    GradientAccumulationPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    get_active_deepspeed_plugin,
)
from tests.support.leaks import reset_state
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")  # importing it takes seconds
deepspeed_ranks = partial(ranks, timeout=300.0)  # importing DeepSpeed takes seconds in every process
MICRO_BATCH = {"train_micro_batch_size_per_gpu": 2}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}


def config_of(stage: int, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **sections.pop("zero", {})}, **MICRO_BATCH, **sections}


@contextmanager
def run_with(plugin: Any, **settings: Any) -> Iterator[Accelerator]:
    """An accelerator whose traces are gone afterwards."""
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls collectives by their old names
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **settings)
    yield accelerator
    accelerator.free_memory()
    reset_state()


def new_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Layers(nn.Module):
    """Repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def new_loader(batch_size: int = 2, count: int = 32) -> DataLoader[Any]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


def prepared(accelerator: Accelerator, lr: float = 0.05, batch_size: int = 2, count: int = 32) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a data loader."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return accelerator.prepare(model, optimizer, new_loader(batch_size, count))


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> list[float]:
    """An epoch; the joint losses of all processes."""
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


@deepspeed_ranks(2)
def test_the_four_combinations_of_dummies(rank: int, world: int) -> None:
    def rates(optimizer: Any, scheduler: Any, config: dict[str, Any], model: Any) -> tuple[list[float], Any, Any]:
        with run_with(DeepSpeedPlugin(hf_ds_config=config)) as accelerator:
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, new_loader(), scheduler)
            assert isinstance(optimizer, DeepSpeedOptimizerWrapper)
            train(accelerator, model, optimizer, loader, scheduler)
            rate = optimizer.param_groups[0]["lr"]
            assert scheduler.get_last_lr() == [rate]
            state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            return rate, type(scheduler), state

    def halve(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    steps = 8  # 32 samples in batches of 2 on 2 processes
    schedule = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")}
    schedule["params"] |= {"warmup_min_lr": "auto", "warmup_type": "linear"}

    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    rate, kind, expected = rates(optimizer, halve(optimizer), config_of(2), model)
    assert rate == pytest.approx(0.01 * 0.5 ** (steps * world))  # once for each process's batch
    assert kind.__name__ == "AcceleratedScheduler"

    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dummy = DummyScheduler(optimizer, warmup_num_steps=16)
    rate, kind, _ = rates(optimizer, dummy, config_of(2, scheduler=schedule), model)
    assert rate == pytest.approx(0.01 * (steps - 1) / 16, rel=0.2)
    assert kind is DeepSpeedSchedulerWrapper

    model = new_model()
    described = DummyOptim(model.parameters(), lr=0.01)
    dummy = DummyScheduler(described, warmup_num_steps=16)
    again, kind, _ = rates(described, dummy, config_of(2, optimizer=ADAM, scheduler=schedule), model)
    assert again == rate
    assert kind is DeepSpeedSchedulerWrapper

    model = new_model()
    described = DummyOptim(model.parameters(), lr=0.01)
    dummy = DummyScheduler(described, lr_scheduler_callable=halve)
    rate, kind, actual = rates(described, dummy, config_of(2, optimizer=ADAM), model)
    assert rate == pytest.approx(0.01 * 0.5**steps)  # DeepSpeed steps it, once for each of its steps
    assert kind is DeepSpeedSchedulerWrapper
    assert actual.keys() == expected.keys()


@deepspeed_ranks(2)
def test_windows_equal_the_big_batch(rank: int, world: int) -> None:
    weights = []
    for batch_size, steps in ((8, 1), (2, 4)):
        for stage in (0, 2, 3):
            plugin = DeepSpeedPlugin(zero_stage=stage, zero3_save_16bit_model=True)
            with run_with(plugin, gradient_accumulation_steps=steps) as accelerator:
                model, optimizer, loader = prepared(accelerator, batch_size=batch_size)
                assert accelerator.deepspeed_config["train_batch_size"] == 16
                train(accelerator, model, optimizer, loader)
                assert model.global_steps == 2
                weights.append(accelerator.get_state_dict(model))
    if rank == 0:
        for one in weights[1:]:
            for name, value in one.items():
                torch.testing.assert_close(value, weights[0][name], rtol=1e-5, atol=1e-6)


@deepspeed_ranks(2)
def test_a_window_truncated_by_the_end_of_the_data_steps(rank: int, world: int) -> None:
    with run_with(DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=3)) as accelerator:
        model, optimizer, loader = prepared(accelerator, count=16)
        assert accelerator.gradient_accumulation_steps == 3
        train(accelerator, model, optimizer, loader)
        assert model.global_steps == 2


@deepspeed_ranks(2)
def test_gradient_clipping(rank: int, world: int) -> None:
    with run_with(DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.1)) as accelerator:
        plain = new_model()
        model, _, loader = prepared(accelerator, lr=0.0, batch_size=16)
        inputs, targets = next(iter(loader))
        assert accelerator.clip_grad_norm_(model.parameters(), 0.1) is None
        accelerator.backward((model(inputs) - targets).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        full = next(iter(new_loader(32)))
        (plain(full[0]) - full[1]).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters()])
        assert norm == pytest.approx(expected.item(), rel=1e-5)
        assert isinstance(accelerator.deepspeed_engine_wrapped, DeepSpeedEngineWrapper)
        with pytest.warns(UserWarning, match=r"max_norm=5.0\) has no effect.*gradient_clipping=0.1"):
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
        with pytest.raises(ValueError, match="clip_grad_value_.*Set gradient_clipping"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        assert not accelerator.optimizer_step_was_skipped


@deepspeed_ranks(2)
def test_clipping_that_nobody_asked_for_is_said_once(rank: int, world: int) -> None:
    with run_with(DeepSpeedPlugin(zero_stage=2)) as accelerator:
        model, _, loader = prepared(accelerator, lr=0.0, batch_size=16)
        inputs, targets = next(iter(loader))
        accelerator.backward((model(inputs) - targets).square().mean() * 1e-3)  # too small to be clipped
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            for _ in range(2):
                accelerator.backward((model(inputs) - targets).square().mean() * 1e3)
        said = [str(one.message) for one in caught if "clips gradients to a norm of 1.0" in str(one.message)]
        assert len(said) == (1 if rank == 0 else 0)
        assert all("gradient_clipping is 'auto'" in one for one in said)


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_states_in_main_memory(rank: int, world: int) -> None:
    curves = []
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}):
        for stage in (1, 2, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # offload_param has no effect below stage 3
                config = config_of(stage, zero=zero, zero_force_ds_cpu_optimizer=False)
                with run_with(DeepSpeedPlugin(hf_ds_config=config)) as accelerator:
                    model = new_model()
                    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                    curves.append(train(accelerator, *accelerator.prepare(model, optimizer, new_loader())))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-6)


@deepspeed_ranks(2)
def test_a_student_and_its_teacher(rank: int, world: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    plugins["teacher"].deepspeed_config |= MICRO_BATCH
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert get_active_deepspeed_plugin(accelerator.state) is plugins["student"]
    student, optimizer, loader = prepared(accelerator)
    expected = new_model(1)(torch.ones(2, 4))
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is plugins["teacher"]
    teacher = accelerator.prepare(new_model(1))
    teacher.eval()
    assert teacher.zero_optimization_stage() == 3
    accelerator.state.select_deepspeed_plugin("student")
    assert student.zero_optimization_stage() == 2
    losses = []
    for inputs, _ in loader:
        with torch.no_grad():
            wanted = teacher(inputs)
        loss = (student(inputs) - wanted).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert student.global_steps == len(losses)
    torch.testing.assert_close(teacher(torch.ones(2, 4)), expected)


@pytest.mark.takes_turns
@deepspeed_ranks(2)
def test_two_models_train_under_two_accelerators(rank: int, world: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    plugins = {name: DeepSpeedPlugin(zero_stage=stage) for name, stage in (("one", 2), ("other", 1))}
    first = Accelerator(cpu=True, deepspeed_plugins=plugins)
    second = Accelerator()
    curves = []
    for accelerator, name in ((first, "one"), (second, "other")):
        accelerator.state.select_deepspeed_plugin(name)
        curves.append(train(accelerator, *prepared(accelerator)))
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
    with pytest.warns(UserWarning, match="one Accelerator for each model"):
        prepared(second)


@deepspeed_ranks(2)
def test_a_teacher_may_come_first(rank: int, world: int) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.deepspeed_config |= MICRO_BATCH
    with run_with(plugin) as accelerator:
        (teacher,) = accelerator._prepare_deepspeed(new_model(1))  # as older trainers do
        student, optimizer, loader = prepared(accelerator)
        train(accelerator, student, optimizer, loader)
        assert (student.global_steps, teacher.global_steps) == (8, 0)


@deepspeed_ranks(2)
def test_a_library_may_prepare_in_its_own_way(rank: int, world: int) -> None:
    """As optimum-habana does."""

    class Own(Accelerator):
        def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
            model, *others = super()._prepare_deepspeed(*args)
            model.seen_by_library = True
            return model, *others

    plugin = DeepSpeedPlugin(zero_stage=1)
    plugin.deepspeed_config |= MICRO_BATCH
    model, optimizer, _ = prepared(Own(cpu=True, deepspeed_plugin=plugin))
    assert model.seen_by_library
    assert type(optimizer) is DeepSpeedOptimizerWrapper


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("regional", [False, True])
@deepspeed_ranks(2)
def test_compiled_models(rank: int, world: int, regional: bool) -> None:
    curves = []
    for backend in ("no", "eager"):
        compilation = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)  # type: ignore[arg-type]
        with run_with(DeepSpeedPlugin(zero_stage=2), dynamo_plugin=compilation) as accelerator:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), Layers(), nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer, loader = accelerator.prepare(model, optimizer, new_loader())
            curves.append(train(accelerator, model, optimizer, loader))
            is_compiled = model.is_compiled or any(
                one._compiled_call_impl is not None for one in model.module[1].layers
            )
            assert is_compiled == (backend == "eager")
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)


@deepspeed_ranks(2)
def test_optimizers_that_look_at_whole_parameters_are_refused(rank: int, world: int) -> None:
    model = new_model()
    with (
        run_with(DeepSpeedPlugin(zero_stage=1)) as accelerator,
        pytest.raises(ValueError, match="Adafactor cannot update shards of parameters, .* under ZeRO stage 1"),
    ):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()), new_loader())


@deepspeed_ranks(2)
def test_experts_are_gathered_as_one(rank: int, world: int) -> None:
    from deepspeed.utils import z3_leaf_module

    class Experts(nn.Sequential):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Experts(nn.Linear(4, 1)))
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Experts")
    plugin.deepspeed_config |= MICRO_BATCH
    with run_with(plugin) as accelerator:
        engine = accelerator.prepare(model)
        assert z3_leaf_module(engine.module[1])
        assert not z3_leaf_module(engine.module[0])


def make_llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))


@pytest.mark.takes_turns
@deepspeed_ranks(2)
def test_sequences_are_sharded(rank: int, world: int) -> None:
    pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 32, (8,), generator=generator) for _ in range(8)]
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(8)} for row in words]
    plain = make_llama()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = []
    for batch in DataLoader(rows, batch_size=2):  # type: ignore[arg-type]
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    config = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)  # "auto" would be 1
    with run_with(plugin, parallelism_config=config) as accelerator:
        model = make_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        assert accelerator.deepspeed_config["train_batch_size"] == 2
        assert len(loader) == 4
        losses = []
        for part in loader:
            assert part["input_ids"].shape == (2, 4)
            loss = model(**part, labels=part["shift_labels"]).loss
            loss = accelerator.mean_over_tokens(loss, (part["shift_labels"] != -100).sum())
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses == pytest.approx(expected, abs=1e-5)
        part["position_ids"] = torch.arange(4).expand(2, 4)  # two samples packed into each sequence
        with pytest.raises(ValueError, match='sp_backend="deepspeed".: position_ids are not consecutive'):
            model(**part)
        other = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="Linear has no config"):
            accelerator.prepare(other, torch.optim.SGD(other.parameters()))


@pytest.mark.takes_turns
@deepspeed_ranks(2)
def test_transformers_builds_models_in_shards(rank: int, world: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if rank == 0:
        make_llama().save_pretrained(tmp_path)
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True)
    plugin.deepspeed_config |= MICRO_BATCH
    with run_with(plugin) as accelerator:
        accelerator.wait_for_everyone()
        assert plugin.is_zero3_init_enabled()
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        weight = model.lm_head.weight
        assert (weight.shape, weight.ds_shape) == (torch.Size([0]), torch.Size([32, 16]))
        with plugin.zero3_init_context_manager(enable=False):
            full = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
            assert full.lm_head.weight.shape == (32, 16)
        model = accelerator.prepare(model)
        model.eval()
        inputs = torch.arange(6)[None]
        torch.testing.assert_close(model(inputs).logits, full(inputs).logits)
        state = accelerator.get_state_dict(model)
        assert (state["lm_head.weight"].equal(full.lm_head.weight) if rank == 0 else state == {}) is True


@deepspeed_ranks(2)
def test_checkpoints_that_cannot_be_used_change_nothing(rank: int, world: int, tmp_path: Path) -> None:
    with run_with(DeepSpeedPlugin(zero_stage=2)) as accelerator:
        train(accelerator, *prepared(accelerator))
        beside = accelerator.prepare_model(nn.Linear(2, 2))
        accelerator.save_state(tmp_path / "engine", exclude_frozen_parameters=True)
        kept = beside.weight.detach().clone()
        nn.init.zeros_(beside.weight)
        accelerator.load_state(tmp_path / "engine", load_optimizer_states=False)
        assert torch.equal(beside.weight, kept)
        accelerator.wait_for_everyone()
        if rank == 0:
            (tmp_path / "engine" / "manifest.json").unlink()  # as of accelerate 1.15, so that checksums do not notice
        accelerator.wait_for_everyone()
        accelerator.load_state(tmp_path / "engine")
        accelerator.wait_for_everyone()
        part = tmp_path / "engine" / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        if rank == 0:
            part.rename(tmp_path / "aside")
        accelerator.wait_for_everyone()
        with pytest.raises(ValueError, match="saved by 2 ranks, but has optimizer states of 1"):
            accelerator.load_state(tmp_path / "engine")
        accelerator.wait_for_everyone()
        if rank == 0:
            torch.save({"harmful": _Harmful(str(tmp_path / "harmed"))}, part)
        accelerator.wait_for_everyone()
        with pytest.raises((ValueError, RuntimeError), match="more than plain data"):
            accelerator.load_state(tmp_path / "engine")
        assert not (tmp_path / "harmed").exists()
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    with pytest.raises((ValueError, RuntimeError), match="models that DeepSpeed trained and others"):
        accelerator.load_state(tmp_path / "engine")


class _Harmful:
    """Pickles to a call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' is not supported with DeepSpeed on the CPU"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, average_over="weights")},
            "takes the optimizer step in backward. Leave it out",
        ),
    ],
)
def test_what_deepspeed_does_not_do_is_said_at_once(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), **settings)


@deepspeed_ranks(2)
def test_axes_of_others_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="tp_size, which cannot be combined with DeepSpeed"):
        Accelerator(
            cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), parallelism_config=ParallelismConfig(tp_size=2)
        )


ALONE = """
import torch
from accelerate import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
print("steps:", model.global_steps, accelerator.distributed_type.value)
accelerator.end_training()
"""


@pytest.mark.takes_turns
def test_a_process_that_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    done = subprocess.run(
        [sys.executable, tmp_path / "alone.py"], env=known, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "steps: 4 DEEPSPEED" in done.stdout
