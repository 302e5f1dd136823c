"""Training in 8-bit floats with torchao: which layers are converted, that they train, and the error without it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import accelerate.accelerator
from accel_integrations.precision import float8
from accel_integrations.precision.float8 import float8_backend
from accel_integrations.precision.float8_layers import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_state import libraries, nvidia
from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import FP8BackendType
from accel_state.errors import MissingLibraryError
from accel_state.libraries import is_torchao_available
from accel_state.processes import PartialState
from accel_state.settings.fp8 import AORecipeKwargs, MSAMPRecipeKwargs
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.integrations.training import new_engine
from tests.support.ranks import ranks

if is_torchao_available():
    with warnings.catch_warnings(action="ignore"):  # of its own source, when it is compiled
        import torchao.float8

needs_library = pytest.mark.skipif(not is_torchao_available(), reason="torchao is not installed")


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 17)), nn.Linear(17, 4)
    )


def converted(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]


def emulated(**settings: object) -> AORecipeKwargs:
    """A recipe that any machine can follow."""
    return AORecipeKwargs(config=torchao.float8.Float8LinearConfig(emulate=True), **settings)  # type: ignore[arg-type]


def losses_of(accelerator: Accelerator, model: nn.Module, steps: int = 40) -> list[float]:
    """Train the model to do what a matrix does."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    inputs = torch.randn(64, 16, generator=generator)
    targets = inputs @ torch.linspace(-1, 1, 64).view(16, 4)
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_library
def test_a_library_may_convert_layers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As axolotl does, which leaves out routers of experts."""
    original = accelerate.accelerator.convert_model_to_fp8_ao

    def convert(model: nn.Module, config: Any = None, module_filter_func: Any = None, **others: Any) -> None:
        assert module_filter_func is None
        original(model, config=config, module_filter_func=lambda layer, name: name == "2.2", **others)

    monkeypatch.setattr(accelerate.accelerator, "convert_model_to_fp8_ao", convert, raising=False)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated()])
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)))
    assert converted(accelerator.prepare_model(model)) == ["2.2"]


# ---- which layers -------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_linear_layer_are_found_by_name() -> None:
    assert find_first_last_linear_layers(new_model()) == ("0", "3")
    assert find_first_last_linear_layers(nn.Sequential(nn.Linear(2, 2))) == ("0", "0")
    assert find_first_last_linear_layers(nn.Sequential(nn.ReLU())) == (None, None)


def test_layers_are_chosen_by_kind_name_and_size() -> None:
    fits = nn.Linear(32, 16)
    assert filter_linear_layers(fits, "middle", ["first", "last"])
    assert not filter_linear_layers(fits, "first", ["first", "last"])
    assert not filter_linear_layers(nn.Linear(24, 16), "middle", [])
    assert not filter_linear_layers(nn.Linear(16, 24), "middle", [])
    assert not filter_linear_layers(nn.ReLU(), "middle", [])
    assert filter_first_and_last_linear_layers(fits, "middle")


@needs_library
def test_only_suitable_layers_are_converted_unless_a_function_says_which() -> None:
    model = new_model()
    weights = dict(model.named_parameters())
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model)
    assert converted(model) == ["2.0"]
    assert has_ao_layers(model)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    model = new_model()
    convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "0")
    assert converted(model) == ["0"]


# ---- training -----------------------------------------------------------------------------------------------------


@needs_library
def test_models_train_in_8_bits() -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[emulated()])
    assert accelerator.fp8_backend is FP8BackendType.AO
    model = new_model()
    losses = losses_of(accelerator, model)
    assert has_ao_layers(model)
    assert losses[-1] < losses[0] / 4
    assert model(torch.randn(16, 16)).dtype is torch.float32
    state = accelerator.get_state_dict(model)
    assert set(state) == set(new_model().state_dict())
    assert all(tensor.dtype is torch.float32 for tensor in state.values())
    with accelerator.autocast():
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@needs_library
def test_the_recipe_says_which_layers_and_a_model_without_suitable_ones_is_warned_about() -> None:
    recipe = emulated(module_filter_func=lambda module, name: name == "2.0" and isinstance(module, nn.Linear))
    model = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe]).prepare(new_model())
    assert converted(model) == ["2.0"]
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[emulated()])
    with pytest.warns(UserWarning, match="converts no layer of Linear, which trains in bfloat16"):
        accelerator.prepare(nn.Linear(4, 4))


@needs_library
def test_emulated_8_bits_need_no_gpu_that_computes_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    nvidia.check_cuda_fp8_capability.cache_clear()
    PartialState(cpu=True)
    PartialState._shared_state["device"] = torch.device("cuda", 0)
    try:
        assert Accelerator(mixed_precision="fp8", kwargs_handlers=[emulated()]).fp8_enabled
    finally:
        nvidia.check_cuda_fp8_capability.cache_clear()


# ---- the library --------------------------------------------------------------------------------------------------


def test_the_library_is_that_of_the_recipe_then_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_backend(MSAMPRecipeKwargs()) == "MSAMP"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    assert float8_backend(None) == "TE"
    assert float8_backend(MSAMPRecipeKwargs()) == "MSAMP"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "cheese")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND='cheese' is not valid. Choose from AO, TE, MSAMP"):
        float8_backend(None)
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
    monkeypatch.setattr(float8, "is_torchao_available", lambda: False)
    assert float8_backend(None) == "TE"


def test_without_a_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setattr(libraries, "is_torchao_available", lambda: False)
    engine = new_engine()
    with pytest.raises(MissingLibraryError, match="pip install.*torchao"):
        engine.make_precision("fp8")
    engine.context.handlers.fp8 = MSAMPRecipeKwargs()
    with pytest.raises(NotImplementedError, match="MS-AMP is no longer developed or published. Use AORecipeKwargs"):
        engine.make_precision("fp8")


@needs_library
@ranks(2)
@pytest.mark.parametrize(("shards", "gathers_in_8_bits"), [(False, False), (True, False), (True, True)])
def test_replicas_and_sharded_models_train_in_8_bits(
    rank: int, world: int, shards: bool, gathers_in_8_bits: bool
) -> None:
    config = torchao.float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_in_8_bits)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True) if shards else None
    accelerator = Accelerator(
        mixed_precision="fp8", cpu=True, fsdp_plugin=plugin, kwargs_handlers=[AORecipeKwargs(config=config)]
    )
    model = new_model()
    losses = losses_of(accelerator, model, steps=10)
    assert losses[-1] < losses[0]
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(new_model().state_dict()) if accelerator.is_main_process or not shards else set())
    for parameter in () if shards else model.parameters():
        both = accelerator.gather(parameter.detach().unsqueeze(0))
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
