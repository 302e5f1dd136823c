"""Models that cannot have their sequences shared between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from accel_integrations.parallel.patched_attention import check_no_recurrent_layers


def model_with(**settings: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "kind", ["linear_attention", "linear_attention_with_gate", "mamba2", "conv", "hybrid_sliding"]
)
def test_recurrent_layers_are_refused(kind: str) -> None:
    model = model_with(layer_types=["full_attention", kind, kind])
    with pytest.raises(ValueError, match=rf"cp_size=2 gives .* Linear has layers of the kinds '{kind}', whose"):
        check_no_recurrent_layers(model, "cp_size=2")


def test_the_text_part_of_a_configuration_decides() -> None:
    text = SimpleNamespace(layer_types=["linear_attention"])
    with pytest.raises(ValueError, match="Sequence parallelism"):
        check_no_recurrent_layers(model_with(get_text_config=lambda: text))
    check_no_recurrent_layers(model_with(layer_types=["conv"], get_text_config=lambda: SimpleNamespace()))


def test_other_layers_pass_and_so_do_models_that_do_not_name_theirs() -> None:
    for layer_types in (["full_attention", "sliding_attention", "chunked_attention", "moe"], [], None, (None,)):
        check_no_recurrent_layers(model_with(layer_types=layer_types))
    check_no_recurrent_layers(nn.Linear(1, 1))
    check_no_recurrent_layers(model_with())


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("Gemma3Config", False), ("Qwen3NextConfig", True), ("FalconH1Config", True)],
)
def test_models_of_transformers(name: str, is_refused: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)()
    if not getattr(config.get_text_config(), "layer_types", None):
        pytest.skip(f"{name} of transformers {transformers.__version__} does not name its layers")
    model = SimpleNamespace(config=config)
    if is_refused:
        with pytest.raises(ValueError, match="restart in each shard"):
            check_no_recurrent_layers(model)
    else:
        check_no_recurrent_layers(model)
