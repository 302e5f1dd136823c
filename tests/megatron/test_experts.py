"""Mixtures of experts under Megatron-LM: with experts in one place, and distributed over replicas and tensor-parallel ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accelerate.utils import MegatronLMPlugin
from tests.megatron.training import Case, check_steps, megatron_ranks, new_model, run_with

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

STEPS, BATCH = 5, 8
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
ETP2: dict[str, Any] = {"expert_tensor_parallel_size": 2}
PP2 = {"pp_degree": 2, "num_micro_batches": 2}
TP2 = {"tp_degree": 2, "sequence_parallelism": True}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


ON_TWO: list[Case] = [
    ("Mixtral", EP2, MIXTRAL),
    ("Mixtral", PP2, MIXTRAL | {"tie_word_embeddings": True}),
    ("Mixtral", EP2 | {"use_distributed_optimizer": True, "num_micro_batches": 2}, MIXTRAL),
    ("Mixtral", TP2, MIXTRAL),
    ("Qwen3Moe", TP2 | EP2 | {"num_micro_batches": 2}, QWEN | {"norm_topk_prob": False}),
    ("Qwen3Moe", {}, QWEN | {"norm_topk_prob": True}),
    ("Mixtral", TP2 | ETP2, MIXTRAL),
    ("Qwen3Moe", ETP2, QWEN | {"norm_topk_prob": True}),
]
ON_FOUR: list[Case] = [
    ("Mixtral", TP2 | EP2, MIXTRAL),
    ("Mixtral", TP2 | {"expert_model_parallel_size": 4}, MIXTRAL),
    ("Mixtral", TP2 | EP2 | PP2, MIXTRAL),
    ("Qwen3Moe", TP2 | {"use_distributed_optimizer": True}, QWEN),
    ("Mixtral", TP2 | EP2 | ETP2 | {"num_micro_batches": 2}, MIXTRAL),
    ("Qwen3Moe", TP2 | ETP2 | PP2, QWEN),
    ("Mixtral", TP2 | ETP2 | {"context_parallel_size": 2}, MIXTRAL),
    ("Qwen3Moe", TP2 | {"expert_tensor_parallel_size": 4, "use_distributed_optimizer": True}, QWEN),
]


@megatron_ranks(2)
def test_the_same_steps_as_in_one_process(rank: int, world: int) -> None:
    check_steps(world, ON_TWO, STEPS, BATCH)


@megatron_ranks(4)
def test_the_same_steps_on_four_ranks(rank: int, world: int) -> None:
    check_steps(world, ON_FOUR, STEPS, BATCH)


@megatron_ranks(2)
def test_ranks_hold_experts_of_their_own(rank: int, world: int) -> None:
    """How their states load with other degrees: see `test_states.py`."""
    with run_with(MegatronLMPlugin(**EP2)) as accelerator:
        original = new_model("Mixtral", **MIXTRAL)
        expected = {name: value.clone() for name, value in original.state_dict().items()}
        model = accelerator.prepare(original)
        held = [name for name in model.parts.weights.held if ".local_experts." in name]
        assert {int(name.split("local_experts.")[1].split(".")[0]) for name in held} == {2 * rank, 2 * rank + 1}
        weights = accelerator.get_state_dict(model)
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@megatron_ranks(2)
def test_experts_that_cannot_be_distributed_are_refused(rank: int, world: int) -> None:
    for words, layout, kind, options in (
        (r"expert_model_parallel_size=2 does not divide the model's 3 experts", EP2, "Mixtral", MIXTRAL | {"num_local_experts": 3}),
        (r"expert_model_parallel_size=2, but the model has no experts", EP2, "Llama", {}),
        (r"expert_model_parallel_size=4 does not divide the 2 processes of each pipeline stage", {"expert_model_parallel_size": 4}, "Mixtral", MIXTRAL),
        (r"expert_model_parallel_size=2 x expert_tensor_parallel_size=2 = 4 does not divide the 2 processes", EP2 | ETP2, "Mixtral", MIXTRAL),
        (r"expert_tensor_parallel_size=2 does not divide the 25 columns", ETP2, "Qwen3Moe", QWEN | {"moe_intermediate_size": 25}),
        (r"tp_degree=2 with a mixture of experts needs sequence_parallelism=True", {"tp_degree": 2}, "Mixtral", MIXTRAL),
        (r"custom_prepare_model_function with tp_degree=2 and a mixture", TP2 | {"custom_prepare_model_function": list, "custom_model_provider_function": list}, "Mixtral", MIXTRAL),
        (r"output_router_logits=True", {}, "Mixtral", MIXTRAL | {"output_router_logits": True}),
        (r"mlp_only_layers=\[0\]", {}, "Qwen3Moe", QWEN | {"mlp_only_layers": [0]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words), run_with(MegatronLMPlugin(**layout)) as accelerator:
            accelerator.prepare(new_model(kind, **options))


@megatron_ranks(2)
def test_groups_of_the_program_that_shard_experts_are_refused(rank: int, world: int) -> None:
    from megatron.core import parallel_state

    from accel_integrations.megatron.groups import drop_groups

    drop_groups()  # of earlier tests
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    try:
        with (
            pytest.raises(ValueError, match=r"expert_tensor_parallel_size=2, not 1 as MegatronLMPlugin says"),
            run_with(MegatronLMPlugin(**TP2)) as accelerator,
        ):
            accelerator.prepare(new_model("Mixtral", **MIXTRAL))
    finally:
        parallel_state.destroy_model_parallel()
