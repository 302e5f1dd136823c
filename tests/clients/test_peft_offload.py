"""The peft library's adapters on a base model whose layers are in memory and on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.tensors import set_module_tensor_to_device
from tests.bigmodel.lanes import LateLane, stream_through
from tests.clients.test_transformers_offload import PLACES

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # the libraries warn each other
WORDS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A base model, and an adapter that does something."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=3, max_position_embeddings=32, **sizes)
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "model")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    return tmp_path / "model", tmp_path / "adapter"


def spread_model(folder: Path, offload: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=PLACES, offload_folder=str(offload))


def test_an_adapter_works_on_an_offloaded_base(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the library makes folders
    base, adapter = folders
    plain = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    spread = peft.PeftModel.from_pretrained(
        spread_model(base, tmp_path / "offload"),
        adapter,
        device_map={f"base_model.model.{name}": place for name, place in PLACES.items()},
        offload_dir=str(tmp_path / "adapter-offload"),
    )
    stream_through(spread, LateLane(), Streaming(depth=1, budget=20_000))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(spread(WORDS).logits, plain(WORDS).logits)
        assert torch.equal(spread.generate(WORDS, **settings), plain.generate(WORDS, **settings))
        with spread.disable_adapter(), plain.disable_adapter():
            assert torch.equal(spread(WORDS).logits, plain(WORDS).logits)


def test_an_adapter_learns_on_an_offloaded_base(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = folders
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    losses: list[list[float]] = []
    for is_spread in (False, True):
        torch.manual_seed(0)
        model = (
            spread_model(base, tmp_path / "offload")
            if is_spread
            else transformers.AutoModelForCausalLM.from_pretrained(base)
        )
        model = peft.get_peft_model(model, copy.deepcopy(settings))
        torch.manual_seed(1)
        for name, parameter in list(model.named_parameters()):
            if parameter.requires_grad:  # the library leaves adapters of layers without values without values too
                value = torch.randn(parameter.shape) if "lora_A" in name else torch.zeros(parameter.shape)
                set_module_tensor_to_device(model, name, "cpu", value=value)
        if is_spread:
            stream_through(model, LateLane(), Streaming(depth=1, budget=20_000))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert trained
        optimizer = torch.optim.SGD(trained, lr=0.5)
        losses.append([])
        for _ in range(5):
            loss = model(input_ids=WORDS, labels=WORDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == losses[0]
    assert losses[0][-1] < losses[0][0]
