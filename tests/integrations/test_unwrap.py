"""From a prepared model back to the user's."""

from __future__ import annotations

import sys
import types

import pytest
from torch import nn

from accel_integrations.unwrap import extract_model_from_parallel
from tests.integrations.training import new_engine, new_model, prepare
from tests.support.ranks import ranks


def test_plain_and_data_parallel_models_and_other_objects_come_back() -> None:
    model = new_model()
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False) is model
    assert extract_model_from_parallel(nn.DataParallel(model)) is model
    assert extract_model_from_parallel("no model", keep_fp32_wrapper=False, recursive=True) == "no model"


@ranks(2)
def test_replicas_are_taken_off_and_in_children_only_when_asked(rank: int) -> None:
    inner = new_model()
    replica = prepare(new_engine(), inner)
    assert extract_model_from_parallel(replica) is inner
    outer = nn.Sequential(nn.Sequential(replica), nn.ReLU())
    assert extract_model_from_parallel(outer)[0][0] is replica
    assert extract_model_from_parallel(outer, recursive=True)[0][0] is inner


def test_wrappers_of_libraries_are_known_once_these_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("deepspeed")

    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    library.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    model = new_model()
    wrapped = DeepSpeedEngine(model)
    assert extract_model_from_parallel(wrapped) is wrapped
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    assert extract_model_from_parallel(wrapped) is model
