"""Megatron-LM, real, on the CPU: the same losses and gradient norms as one process of plain PyTorch."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accelerate.utils import GradScalerKwargs, MegatronLMPlugin
from tests.megatron.training import (
    check_run,
    check_steps,
    megatron_ranks,
    new_model,
    new_rows,
    plain_training,
    run_with,
    start,
    train,
)

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

STEPS = 5
BATCH = 8  # samples of a step, over all replicas and micro-batches


DP2: dict[str, Any] = {}
MULTIQUERY = {"other_megatron_args": {"position_embedding_type": "rope", "attention_head_type": "multiquery"}}
TP2 = {"tp_degree": 2}
PP2 = {"pp_degree": 2, "num_micro_batches": 4}
SP2 = {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2}
VPP2 = {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}
TIED = {"tie_word_embeddings": True}
NOT_TIED = {"tie_word_embeddings": False}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("layout", "kind", "masked", "options"),
    [
        (DP2, "Llama", True, TIED),
        (MULTIQUERY, "Llama", False, {"num_key_value_heads": 1}),
        (DP2 | {"num_micro_batches": 2}, "GPT2", True, {}),
        (TP2, "Llama", True, NOT_TIED),
        (TP2, "GPT2", False, {}),
        (TP2, "Qwen2", False, TIED),
        (PP2, "Llama", True, TIED),
        (PP2, "Mistral", False, NOT_TIED),
        (PP2, "GPT2", True, NOT_TIED),
        (VPP2, "Llama", True, TIED),
        (VPP2, "GPT2", False, {}),
        (SP2, "Llama", True, NOT_TIED),
        (SP2, "GPT2", False, {}),
        (TP2, "Qwen3", True, {"head_dim": 8}),
        (TP2, "Llama", False, {"attention_bias": True, "mlp_bias": True}),
        (TP2 | {"recompute_activations": True}, "Llama", True, TIED),
        (PP2 | {"recompute_activations": True, "recompute_granularity": "selective"}, "GPT2", False, {}),
        (PP2 | {"decoder_last_pipeline_num_layers": 1}, "Llama", False, NOT_TIED),
        ({"use_distributed_optimizer": True, "num_micro_batches": 2}, "Llama", True, NOT_TIED),
        ({"calculate_per_token_loss": False, "num_micro_batches": 2}, "Llama", False, TIED),
    ],
    ids=str,
)
@megatron_ranks(2)
def test_two_ranks(rank: int, world: int, layout: dict[str, Any], kind: str, masked: bool, options: Any) -> None:
    check_run(world, partial(new_model, kind, **options), layout, new_rows(STEPS * BATCH, masked), BATCH)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (TP2 | PP2, "Llama"),
        (SP2 | VPP2, "GPT2"),
        (PP2, "Qwen2"),
    ],
    ids=str,
)
@megatron_ranks(4)
def test_four_ranks(rank: int, world: int, layout: dict[str, Any], kind: str) -> None:
    check_steps(world, [(kind, layout, {})], STEPS, BATCH)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@megatron_ranks(2)
def test_half_the_bytes_stay_close_to_one_process_in_float32(rank: int, world: int, precision: str) -> None:
    dtype, tolerance = {"bf16": (torch.bfloat16, 1e-2), "fp16": (torch.float16, 2e-3)}[precision]
    rows = new_rows(STEPS * BATCH, masked=True)
    expected = plain_training(new_model(initializer_range=0.05), rows, BATCH)
    for layout, micro_batch in ((TP2, BATCH), (PP2, BATCH // 4), (DP2, BATCH // 2)):
        scaler = GradScalerKwargs(init_scale=2.0**10)  # with which no gradient overflows
        with run_with(MegatronLMPlugin(**layout), mixed_precision=precision, kwargs_handlers=[scaler]) as accelerator:
            parts = start(accelerator, new_model(initializer_range=0.05), rows, micro_batch)
            assert {one.dtype for one in parts[0].parameters()} == {dtype}
            found = train(accelerator, *parts)
        for (ours, norm), (theirs, expected_norm) in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance), layout
            assert norm == pytest.approx(expected_norm, rel=tolerance), layout
            assert ours != theirs
