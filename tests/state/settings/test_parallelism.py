"""How the axes of a mesh are used."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.parallelism import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)


def test_context_parallel_strategies() -> None:
    with pytest.raises(ValueError, match=r"cp_comm_strategy='alltoal'.*Did you mean 'alltoall'\?"):
        TorchContextParallelConfig("alltoal")


def test_sequence_lengths_are_needed_only_when_they_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    assert DeepSpeedSequenceParallelConfig().sp_seq_length is None
    assert DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False).sp_seq_length == 128
    assert DeepSpeedSequenceParallelConfig(sp_seq_length=64).sp_seq_length == 64
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "None")
    with pytest.raises(ValueError, match="sp_seq_length=None .* sp_seq_length_is_variable=False"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)


def test_attention_that_can_be_split() -> None:
    for name in ("flash_attention_2", "flash_attention_3", "sdpa", "kernels-community/flash-attn2"):
        assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=name).sp_attn_implementation == name
    for name in ("eager", "flex_attention", "flash-attn", "kernels-community/other"):
        with pytest.raises(ValueError, match=f"sp_attn_implementation='{name}'"):
            DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)


def test_tensor_parallel_settings() -> None:
    assert not TorchTensorParallelConfig().enable_async_tp
    with pytest.warns(UserWarning, match="no effect yet"):
        TorchTensorParallelConfig(enable_async_tp=True)
    plugin = TorchTensorParallelPlugin(tp_size=2)
    assert (plugin.tp_size, plugin.distributed_type) == (2, None)
    assert {"cpu", "cuda"} <= plugin.works_on
    plugin.attach(None)  # type: ignore[arg-type] # it has nothing to take over


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "x"])
def test_sizes_are_positive(size: Any) -> None:
    with pytest.raises(ValueError, match="TorchTensorParallelPlugin.tp_size="):
        TorchTensorParallelPlugin(tp_size=size)


def test_stages_per_rank_go_with_the_schedule() -> None:
    assert PipelineParallelConfig("interleaved1f1b").stages_per_rank == 2
    assert PipelineParallelConfig("1F1B") == PipelineParallelConfig("1f1b", stages_per_rank=1)
    with pytest.raises(ValueError, match="schedule='gpipe', stages_per_rank=2.*needs at least 2"):
        PipelineParallelConfig(stages_per_rank=2)
    with pytest.raises(ValueError, match="needs at least 2 stages per rank"):
        PipelineParallelConfig("interleaved1f1b", stages_per_rank=1)
    assert PipelineParallelConfig(split_points=["h.1"]).split_points == ["h.1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "gpip"}, "schedule='gpip'.*Did you mean 'gpipe'"),
        ({"num_microbatches": 0}, "num_microbatches=0 .* at least 1"),
        ({"split_points": []}, r"split_points=\[\]"),
        ({"split_points": [2]}, r"split_points=\[2\] .* names of the modules"),
        ({"loss_weight": 3}, "loss_weight=3 .* a function"),
    ],
)
def test_pipelines_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineParallelConfig(**settings)
