"""What attributes of the accelerator that libraries built on it use do; all of them are listed in `test_private_names`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import FP8BackendType
from accel_state.mesh import ParallelismConfig
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accel_state.settings.handlers import KwargsHandler
from accelerate import Accelerator
from tests.support.ranks import ranks


class AORecipeKwargs(KwargsHandler):
    """Stands in for the recipe of this name, which needs its library."""

    slot = "fp8"


def test_hooks_of_checkpoints_can_be_looked_up() -> None:
    accelerator = Accelerator(cpu=True)
    handle = accelerator.register_save_state_pre_hook(print)
    assert list(accelerator._save_model_state_pre_hook.values()) == [print]
    handle.remove()
    assert not accelerator._save_model_state_pre_hook
    accelerator.register_load_state_pre_hook(print)
    assert list(accelerator._load_model_state_pre_hook.values()) == [print]


def test_the_fp8_library_follows_recipe_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()])  # type: ignore[list-item]
    assert accelerator.ao_recipe_handler is accelerator.fp8_recipe_handler is not None
    assert accelerator.fp8_backend is FP8BackendType.NO
    accelerator.fp8_enabled = True
    assert accelerator.fp8_backend is FP8BackendType.AO
    accelerator.fp8_recipe_handler = None
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    assert accelerator.fp8_backend is FP8BackendType.TE


def test_the_lists_of_prepared_objects_are_filled_in_place() -> None:
    accelerator = Accelerator(cpu=True)
    models, optimizers, schedulers, loaders, custom = (
        accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders,
        accelerator._custom_objects,
    )  # fmt: skip
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(model, optimizer, scheduler, torch.utils.data.DataLoader([1.0]))
    accelerator.register_for_checkpointing(model)
    assert [models, optimizers, schedulers, loaders, custom] == [*([item] for item in prepared), [model]]
    accelerator.free_memory()
    assert [models, optimizers, schedulers, loaders] == [[], [], [], []]
    assert accelerator._custom_objects is custom
    assert custom == [model]  # which the program still has


def test_state_hooks_of_other_libraries() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.gradient_state._set_sync_gradients(False)  # as transformers does
    assert accelerator.sync_gradients is False
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 2}
    accelerator.gradient_state.plugin_kwargs.update({"num_steps": 5})
    assert accelerator.gradient_accumulation_steps == 5
    accelerator.sync_gradients = True
    assert accelerator.gradient_state.sync_gradients is True
    assert accelerator.state._shared_state


def test_a_subclass_may_override_how_one_kind_is_prepared() -> None:
    class Mine(Accelerator):
        def prepare_model(self, model: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
            seen.append(model)
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[arg-type]

    seen: list[torch.nn.Module] = []
    model = torch.nn.Linear(1, 1)
    Mine(cpu=True).prepare(model)
    assert seen == [model]


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_rank",
        "context_parallel_rank",
        "pipeline_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
    ],
)
def test_ranks_on_axes_that_are_not_used_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"parallelism_config=ParallelismConfig\("):
        getattr(Accelerator(cpu=True), name)


@ranks(2)
def test_trainers_may_set_how_replicas_are_built(rank: int, world: int) -> None:
    accelerator = Accelerator()
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    assert accelerator.prepare(torch.nn.Linear(1, 1)).find_unused_parameters


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_every_model_may_have_its_own_scaler(precision: str) -> None:
    """As imagen-pytorch assigns one before each step."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
    models = [accelerator.prepare(model) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1) for scale in (8.0, 64.0)]
    for turn, scale in enumerate([8.0, 64.0, 16.0, 128.0, 32.0]):
        model, optimizer, scaler = models[turn % 2], optimizers[turn % 2], scalers[turn % 2]
        accelerator.scaler = scaler
        assert accelerator.scaler is scaler
        before = model.bias.item()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        assert model.bias.grad.item() == scale
        optimizer.step()
        optimizer.zero_grad()
        assert model.bias.item() == pytest.approx(before - 1, abs=1e-6)
    accelerator.scaler = None
    accelerator.backward(models[0](torch.ones(1, 2)).sum())
    assert models[0].bias.grad.item() == 1.0
    assert scalers[0].get_scale() == 64.0


def outputs(accelerator: Accelerator) -> tuple[torch.dtype, torch.dtype]:
    """What a model computes in after `prepare`, and another one in an `autocast` block."""
    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    accelerator.prepare(model)(torch.ones(1, 2))
    with accelerator.autocast():
        return seen[0], torch.nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocasting_may_be_changed(precision: str, dtype: torch.dtype) -> None:
    """As denoising-diffusion-pytorch assigns it."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    scaler = accelerator.scaler
    first, second = (torch.float32, dtype) if precision != "no" else (dtype, torch.float32)
    for wanted in (first, second):
        accelerator.native_amp = wanted is not torch.float32
        assert accelerator.native_amp is (wanted is not torch.float32)
        assert outputs(accelerator) == (wanted, wanted)
        assert accelerator.scaler is scaler


@ranks(2)
def test_copies_of_the_model_have_ranks(rank: int, world: int) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    assert accelerator.data_parallel_rank == rank
    assert accelerator.should_save_model is (rank == 0)
    with pytest.raises(RuntimeError, match="no 'tp' dimension"):
        _ = accelerator.tensor_parallel_rank


def test_settings_may_be_changed_for_what_is_prepared_later() -> None:
    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True)
    accelerator.rng_types, accelerator.step_scheduler_with_optimizer = [], False
    accelerator.device_placement = False
    later = accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    kinds = [type(loader.batch_sampler.sampler).__name__ for loader in (first, later)]
    assert kinds == ["RandomSampler", "SeedableRandomSampler"]
    assert (later.rng_types, later.device) == ([], None)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert scheduler.split_batches
    assert not scheduler.step_with_optimizer


@ranks(2)
def test_an_accelerator_of_several_processes_can_be_pickled(rank: int, world: int) -> None:
    cases: list[dict[str, Any]] = [{}, {"parallelism_config": ParallelismConfig(dp_replicate_size=2)}]
    for settings in cases:
        AcceleratorState._reset_state()
        accelerator = Accelerator(**settings)
        accelerator.prepare(DataLoader([1, 2, 3, 4]))
        copied = pickle.loads(pickle.dumps(accelerator))
        assert (copied.process_index, copied.num_processes) == (rank, world)
        if not settings:
            model = accelerator.prepare(torch.nn.Linear(1, 1))
            assert len(pickle.loads(pickle.dumps(accelerator))._models) == 1
            assert torch.equal(pickle.loads(pickle.dumps(model)).module.weight, model.module.weight)


def test_an_accelerator_goes_to_another_process() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, mixed_precision="bf16")
    accelerator.prepare(torch.nn.Linear(1, 1))
    copied = pickle.loads(pickle.dumps(accelerator))
    assert copied.state.__dict__ == accelerator.state.__dict__
    assert (copied.gradient_accumulation_steps, copied.mixed_precision) == (3, "bf16")
    loss = copied.prepare(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum()
    copied.backward(loss)
