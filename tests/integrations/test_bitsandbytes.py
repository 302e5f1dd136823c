"""Models in 8 and 4 bits: loaded layer by layer, close to the original, offloaded, saved and loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel.empty import init_empty_weights
from accel_integrations.bitsandbytes import layers, quantize
from accel_integrations.bitsandbytes.layers import (
    get_keys_to_not_convert,
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)
from accel_integrations.bitsandbytes.quantize import (
    get_parameter_device,
    get_quantized_model_device_map,
    load_and_quantize_model,
)
from accel_integrations.bitsandbytes.settings import BnbQuantizationConfig
from accel_state.enums import CustomDtype
from accel_state.errors import MissingLibraryError
from accel_state.libraries import is_bitsandbytes_multi_backend_available

needs_library = pytest.mark.skipif(
    not is_bitsandbytes_multi_backend_available(), reason="bitsandbytes>=0.46 is not installed"
)
INT8 = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
NF4 = BnbQuantizationConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32", bnb_4bit_use_double_quant=True
)
FP4 = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")


class Model(nn.Module):
    """Two layers that are quantised, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("scale", torch.ones(64))
        self.head = nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute (batch, 8) of (batch, 64)."""
        hidden = self.down(torch.relu(self.up(inputs)))
        return self.head(self.norm(hidden) * self.scale)


def empty_model() -> Model:
    with init_empty_weights(include_buffers=False):
        return Model()


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def original() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def checkpoint(original: Model, tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    save_file(original.state_dict(), folder / "model.safetensors")
    return folder


# ---- settings -----------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_filled_in() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert (config.torch_dtype, config.target_dtype, config.llm_int8_threshold) == (torch.float16, torch.int8, 6.0)
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert config.bnb_4bit_compute_dtype is config.torch_dtype is torch.bfloat16
    assert config.target_dtype is CustomDtype.INT4


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "load_in_8bit=False and load_in_4bit=False: set exactly one"),
    ({"load_in_8bit": True, "load_in_4bit": True}, "set exactly one"),
    ({"load_in_8bit": 1}, "load_in_8bit=1 is not valid: expected True or False"),
    ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold='6'"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'int4' is not valid: expected 'fp4' or 'nf4'"),
    ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "bnb_4bit_compute_dtype='fp8'"),
    ({"load_in_8bit": True, "torch_dtype": torch.int8}, "torch_dtype=torch.int8"),
    ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules='head'.*a list"),
])  # fmt: skip
def test_wrong_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BnbQuantizationConfig(**arguments)


def test_the_last_and_the_shared_modules_are_not_quantized(original: Model) -> None:
    assert get_keys_to_not_convert(original) == ["head"]
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    tied[2].weight = tied[0].weight
    assert set(get_keys_to_not_convert(tied)) == {"0", "2"}
    original.base_model_prefix = "model"  # type: ignore[assignment]
    assert get_keys_to_not_convert(original) == []


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "is_bitsandbytes_multi_backend_available", lambda: False)
    with pytest.raises(MissingLibraryError, match="bitsandbytes.*pip install"):
        load_and_quantize_model(Model(), INT8)
    assert not has_4bit_bnb_layers(Model())


@pytest.mark.parametrize("how", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_count_quantised_sizes(how: str) -> None:
    plain = sum(parameter.nbytes for parameter in Model().parameters())
    room: Any = {"cpu": plain // 2}
    places = get_quantized_model_device_map(Model(), INT8, how, room)
    assert set(places.values()) == {"cpu"}


def test_without_a_map_everything_is_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, place in (("cpu", "cpu"), ("cuda:1", 1), ("mps", "mps")):
        monkeypatch.setattr(quantize, "default_device", lambda device=device: torch.device(device))
        assert get_quantized_model_device_map(Model(), INT8) == {"": place}


def test_4_bit_weights_are_not_offloaded() -> None:
    places = {"up": "disk", "down": "cpu", "norm": "cpu", "scale": "cpu", "head": "disk"}
    with pytest.raises(ValueError, match=r"puts 'up.weight' on 'disk', but 4-bit weights cannot be offloaded"):
        get_quantized_model_device_map(Model(), NF4, places)
    with pytest.raises(ValueError, match=r"puts 'down.weight' on 'cpu'"):
        get_quantized_model_device_map(Model(), NF4, {"up": 0, "down": "cpu", "norm": 0, "scale": 0, "head": 0})
    places["up"] = "cpu"
    config = BnbQuantizationConfig(load_in_4bit=True, skip_modules=["head"])
    assert get_quantized_model_device_map(Model(), config, places) == places


# ---- quantising ---------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(("config", "tolerance"), [(INT8, 0.03), (NF4, 0.3), (FP4, 0.5)])
def test_outputs_are_close_to_the_original(
    config: BnbQuantizationConfig, tolerance: float, original: Model, checkpoint: Path, inputs: torch.Tensor
) -> None:
    model: Any = load_and_quantize_model(empty_model(), config, checkpoint, device_map={"": "cpu"})
    assert type(model.up).__name__ == ("Linear8bitLt" if config.load_in_8bit else "Linear4bit")
    assert type(model.head) is nn.Linear
    assert model.up.weight.element_size() == 1
    assert model.is_loaded_in_8bit is config.load_in_8bit
    assert model.is_loaded_in_4bit is config.load_in_4bit is has_4bit_bnb_layers(model)
    assert get_parameter_device(model).type == "cpu"
    assert (model(inputs) - original(inputs)).abs().max() < tolerance
    assert config.skip_modules is None  # as it was


@needs_library
def test_settings_reach_the_layers(checkpoint: Path) -> None:
    config = BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype="bf16",
        bnb_4bit_use_double_quant=True,
        skip_modules=["head"],
        keep_in_fp32_modules=["down", "norm"],
    )
    model: Any = load_and_quantize_model(empty_model(), config, checkpoint, device_map={"": "cpu"})
    assert model.up.compute_dtype is torch.bfloat16
    state = model.up.weight.quant_state
    assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.bfloat16)
    assert type(model.down) is nn.Linear
    assert model.down.weight.dtype is model.norm.weight.dtype is torch.float32
    assert model.head.weight.dtype is torch.bfloat16
    model = replace_with_bnb_layers(Model(), BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=0.0))
    assert {type(model.up).__name__, type(model.head).__name__} == {"Linear8bitLt"}
    assert model.up.state.threshold == 0.0
    assert not model.up.weight.requires_grad
    assert model.up.weight.dtype is torch.float32  # until it is moved


@needs_library
def test_a_sharded_checkpoint_and_a_model_with_weights_are_quantised(
    original: Model, tmp_path: Path, inputs: torch.Tensor
) -> None:
    wanted = original(inputs)
    state = original.state_dict()
    names = list(state)
    index = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for part in set(index.values()):
        save_file({name: state[name] for name in names if index[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    sharded = load_and_quantize_model(empty_model(), INT8, tmp_path, device_map="auto")
    model = load_and_quantize_model(original, INT8, device_map={"": "cpu"})
    assert model is original, "it is quantised where it is"
    for each in (sharded, model):
        assert (each(inputs) - wanted).abs().max() < 0.03


@needs_library
def test_tied_weights_stay_tied_and_are_not_quantised(tmp_path: Path) -> None:
    def tied() -> Any:
        model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False))
        model[2].weight = model[0].weight
        return model

    state = {name: tensor for name, tensor in tied().state_dict().items() if name != "2.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = tied()
    model[2].weight = model[0].weight
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    model = load_and_quantize_model(model, config, tmp_path, device_map={"": "cpu"})
    assert model[2].weight is model[0].weight
    assert model[0].weight.dtype is torch.bfloat16
    assert model(torch.tensor([[1, 2]])).dtype is torch.bfloat16


SPREAD = {"up": "disk", "down": "cpu", "norm": "disk", "scale": "cpu", "head": "cpu"}


@needs_library
def test_8_bit_weights_wait_on_disk(checkpoint: Path, tmp_path: Path, inputs: torch.Tensor) -> None:
    full = load_and_quantize_model(empty_model(), INT8, checkpoint, device_map={"": "cpu"})
    folder = tmp_path / "offloaded"
    model: Any = load_and_quantize_model(empty_model(), INT8, checkpoint, device_map=SPREAD, offload_folder=folder)
    assert model.hf_device_map == SPREAD
    assert (folder / "up.weight.dat").stat().st_size == 64 * 128  # bytes, not floats
    for _ in range(3):
        torch.testing.assert_close(model(inputs), full(inputs), rtol=0, atol=0)
        assert model.up.weight.is_meta
    with pytest.raises(ValueError, match=r"\['up', 'norm'\] to disk. Pass an offload_folder"):
        load_and_quantize_model(empty_model(), INT8, checkpoint, device_map=SPREAD)


@needs_library
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_what_is_not_quantised_keeps_its_dtype_on_disk(
    checkpoint: Path, tmp_path: Path, inputs: torch.Tensor, dtype: torch.dtype | None, bits: str
) -> None:
    config = BnbQuantizationConfig(**{bits: True}, torch_dtype=dtype)
    inputs = inputs.to(config.torch_dtype)
    full = load_and_quantize_model(empty_model(), config, checkpoint, device_map={"": "cpu"})
    places = {"up": "cpu", "down": "cpu", "norm": "disk", "scale": "cpu", "head": "disk"}
    model: Any = load_and_quantize_model(
        empty_model(), config, checkpoint, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert model.head.weight.dtype == config.torch_dtype
    for each in (full, model):
        each.scale = each.scale.to(config.torch_dtype)  # buffers keep the dtype that their model gave them
    assert torch.equal(model(inputs), full(inputs))


def save(model: nn.Module, folder: Path) -> Path:
    path = folder / "saved.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


@needs_library
@pytest.mark.parametrize("device_map", [{"": "cpu"}, SPREAD])
def test_saved_8_bit_weights_load_again(
    device_map: dict[str, Any], checkpoint: Path, tmp_path: Path, inputs: torch.Tensor
) -> None:
    model = load_and_quantize_model(empty_model(), INT8, checkpoint, device_map={"": "cpu"})
    saved = save(model, tmp_path)
    again = load_and_quantize_model(
        empty_model(), INT8, saved, device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    for _ in range(2):
        torch.testing.assert_close(again(inputs), model(inputs), rtol=0, atol=0)
    with pytest.raises(ValueError, match="are quantized to 8 bits, so they cannot be loaded with load_in_4bit"):
        load_and_quantize_model(empty_model(), NF4, saved)


@needs_library
def test_adapters_train_beside_4_bit_weights_which_cannot_be_loaded_once_they_are_saved(
    checkpoint: Path, inputs: torch.Tensor, tmp_path: Path
) -> None:
    model: Any = load_and_quantize_model(empty_model(), NF4, checkpoint, device_map={"": "cpu"})
    adapter = nn.Linear(64, 8)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    before = (model(inputs) + adapter(inputs)).square().mean()
    before.backward()
    optimizer.step()
    assert (model(inputs) + adapter(inputs)).square().mean() < before
    saved = save(model, tmp_path)
    with pytest.raises(ValueError, match="holds 4-bit weights of bitsandbytes"):
        load_and_quantize_model(empty_model(), NF4, saved)


@needs_library
def test_there_must_be_weights_and_a_known_map(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="Model has no weights.*Pass weights_location"):
        load_and_quantize_model(empty_model(), INT8)
    with pytest.raises(ValueError, match="device_map='everywhere' is not valid.*sequential"):
        load_and_quantize_model(empty_model(), INT8, checkpoint, device_map="everywhere")
