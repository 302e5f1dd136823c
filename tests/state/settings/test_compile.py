"""Settings of torch.compile."""

from __future__ import annotations

import pytest

from accel_state.enums import DynamoBackend
from accel_state.settings.compile import TorchDynamoPlugin


def test_nothing_is_compiled_by_default() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert plugin.to_kwargs() == {}
    assert plugin.to_dict()["backend"] == "no"


def test_kwargs_are_those_of_torch() -> None:
    plugin = TorchDynamoPlugin(backend="inductor", fullgraph=True, use_regional_compilation=True)  # type: ignore[arg-type]
    assert plugin.to_kwargs() == {"backend": "inductor", "fullgraph": True}
    assert TorchDynamoPlugin(backend=DynamoBackend.EAGER).to_kwargs() == {"backend": "eager"}


def test_what_the_environment_sets_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "aot_eager", "dynamic": False}


def test_a_misspelt_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend='indctor'.*Did you mean 'inductor'\?"):
        TorchDynamoPlugin(backend="indctor")  # type: ignore[arg-type]
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eagr")
    with pytest.raises(ValueError, match=r"ACCELERATE_DYNAMO_BACKEND='eagr'.*Did you mean 'eager'\?"):
        TorchDynamoPlugin()
