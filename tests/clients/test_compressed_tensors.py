"""The compressed-tensors library, which takes over the hooks of spread models and gives them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate.accelerator import get_state_dict_offloaded_model
from accelerate.hooks import AlignDevicesHook
from tests.clients.test_transformers_offload import PLACES, folder

__all__ = ["folder"]

offload = pytest.importorskip("compressed_tensors.offload")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # the libraries warn each other
WORDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, PLACES])
def test_offloading_changes_hands(folder: Path, device_map: dict[str, str], tmp_path: Path) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(WORDS).logits
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert torch.equal(model(WORDS).logits, expected)
    for _ in range(2):
        offload.from_accelerate(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
        assert torch.equal(model(WORDS).logits, expected)
        places = offload.to_accelerate(model)
        assert set(places.values()) == {"cpu", *device_map.values()}
        assert isinstance(model.lm_head._hf_hook, AlignDevicesHook)
        assert torch.equal(model(WORDS).logits, expected)
    assert len(get_state_dict_offloaded_model(model)) == len(dict(model.named_parameters()))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(WORDS).logits, expected)
