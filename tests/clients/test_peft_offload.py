"""PEFT adapters of models with offloaded weights, made before they are offloaded, after that, or loaded into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload
from tests.clients.test_transformers_offload import PLACES, folder

__all__ = ["folder"]

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for peft
CPU = torch.device("cpu")
WORDS = torch.tensor([[1, 2, 3, 4]])


def losses_of(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_train_as_in_memory(where: str, is_before: bool, use_dora: bool, tmp_path: Path) -> None:
    def adapted(base: nn.Module) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False, use_dora=use_dora)
        return peft.get_peft_model(base, config)

    def offload(module: nn.Module, name: str) -> None:
        cpu_offload(module, CPU) if where == "cpu" else disk_offload(module, tmp_path / name, CPU)

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    other.load_state_dict(base.state_dict())
    if is_before:
        offload(other, "all")
    model = adapted(other)
    if not is_before:
        for name, module in list(model.named_modules()):
            if name.endswith("base_layer"):
                offload(module, name)
    assert {one.device for name, one in model.named_parameters() if "lora" in name} == {CPU}
    losses = losses_of(model)
    assert losses == losses_of(adapted(base))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, PLACES])
def test_adapters_are_loaded_into_an_offloaded_model(
    folder: Path, device_map: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # peft writes weights of layers on disk into a relative folder
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", offload_folder=str(tmp_path / "again")).eval()
    assert torch.equal(loaded(WORDS).logits, model(WORDS).logits)
