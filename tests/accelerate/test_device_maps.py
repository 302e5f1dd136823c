"""Quantized models that a device map has placed: they are never moved, and trained only where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, device_maps
from accelerate.device_maps import check_quantized


class Unmovable(nn.Linear):
    """Stands in for a model with layers of bitsandbytes before 0.48, which cannot be moved."""

    def __init__(self, place: Any, bits: int = 8) -> None:
        super().__init__(2, 2)
        setattr(self, f"is_loaded_in_{bits}bit", True)
        self.hf_device_map = {"": place}

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("`.to` is not supported for 8-bit models")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_model_is_not_moved(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_maps, "is_bitsandbytes_multi_backend_available", lambda: True)
    model = Unmovable("cpu", bits)
    assert Accelerator(cpu=True).prepare(model) is model


@pytest.mark.parametrize("place", [1, "cuda:1", torch.device("cuda", 1), "cuda"])
def test_a_quantized_model_on_the_gpu_of_this_process_is_trained(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    check_quantized(Unmovable(place), torch.device("cuda", 1))
    check_quantized(Unmovable(place), torch.device("cuda"))  # the current one


@pytest.mark.parametrize("place", [0, "cuda:0", torch.device("cuda", 0)])
def test_a_quantized_model_on_the_gpu_of_another_process_is_not_trained(place: Any) -> None:
    with pytest.raises(ValueError, match="was loaded in 8 bits on 'cuda:0', but this process trains on 'cuda:1'"):
        check_quantized(Unmovable(place), torch.device("cuda", 1))


def test_other_models_are_not_looked_at() -> None:
    plain = nn.Linear(1, 1)
    plain.hf_device_map = {"": 0}  # type: ignore[assignment]
    check_quantized(plain, torch.device("cuda", 1))
    check_quantized(nn.Linear(1, 1), torch.device("cuda", 1))
