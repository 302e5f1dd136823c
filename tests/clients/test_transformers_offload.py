"""The transformers library on models that are spread over memory and the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import cpu_offload, disk_offload

transformers = pytest.importorskip("transformers")

PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=3, max_position_embeddings=32, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="30KB")
    return tmp_path / "model"


@pytest.mark.parametrize("device_map", ["auto", PLACES])
def test_a_model_loads_and_writes_text_wherever_its_parts_are(folder: Path, device_map: Any, tmp_path: Path) -> None:
    words = torch.tensor([[1, 2, 3]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    spread = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert torch.equal(spread(words).logits, plain(words).logits)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(spread.generate(words, **settings), plain.generate(words, **settings))
    if device_map != "auto":
        assert spread.hf_device_map == PLACES
        assert spread.model.layers[1].mlp.up_proj.weight.is_meta
        assert not list((tmp_path / "offload").glob("*.dat")), "the checkpoint is read where it is"


def whisper() -> tuple[Any, torch.Tensor]:
    """A model that reads a weight of its encoder between forward passes, and features."""
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in SIZES.items()}
    tokens = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": [],
    }
    config = transformers.WhisperConfig(
        vocab_size=96, d_model=32, num_mel_bins=8, max_source_positions=16, max_target_positions=32, **sizes, **tokens
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.no_timestamps_token_id = 95
    return model, torch.randn(1, 8, 32)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["llama", "whisper"])
def test_inputs_are_moved_to_the_device_of_an_offloaded_model(
    kind: str, where: str, folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if kind == "llama":
        model, inputs = transformers.AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[1, 2, 3]])
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    else:
        (model, inputs), settings = whisper(), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(inputs, **settings)
    cpu_offload(model, "cpu") if where == "cpu" else disk_offload(model, tmp_path / "offload", "cpu")
    assert model.device.type == "meta"
    assert torch.equal(model.generate(inputs.to(model.device), **settings), expected)


@pytest.mark.parametrize("limit", ["10GB", 10**10, float("inf")])
def test_limits_of_memory_in_any_form(folder: Path, limit: Any) -> None:
    limits = {"cpu": limit}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="auto", max_memory=limits)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert limits["cpu"] in (10**10, float("inf"))  # replaced by bytes, with which transformers goes on counting


@pytest.mark.filterwarnings(
    "ignore:You are calling .generate"
)  # transformers 5.17 asks a weight that is offloaded for its device
@pytest.mark.parametrize("options", [{"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": 10}}])
def test_a_model_that_stays_on_disk_as_a_whole(folder: Path, options: dict[str, Any], tmp_path: Path) -> None:
    words = torch.tensor([[1, 2, 3]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    spread = transformers.AutoModelForCausalLM.from_pretrained(folder, offload_folder=str(tmp_path), **options)
    assert spread.hf_device_map == {"": "disk"}
    assert all(parameter.is_meta for parameter in spread.parameters())
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(spread.generate(words, **settings), plain.generate(words, **settings))
    assert torch.equal(spread(words).logits, plain(words).logits)


def test_memory_is_shared_out_as_asked(folder: Path, tmp_path: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    half = sum(parameter.nbytes for parameter in plain.parameters()) // 2
    spread = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": half}, offload_folder=str(tmp_path)
    )
    assert set(spread.hf_device_map.values()) == {"cpu", "disk"}
    held = sum(parameter.nbytes for parameter in spread.parameters() if not parameter.is_meta)
    assert 0 < held <= half
    words = torch.tensor([[1, 2, 3]])
    assert torch.equal(spread(words).logits, plain(words).logits)
