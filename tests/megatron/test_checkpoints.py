"""Checkpoints of Megatron-LM itself: written for megatron-core's own loader, and read from both of its formats."""

from __future__ import annotations

import warnings
from argparse import Namespace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.utils import MegatronLMPlugin
from tests.megatron.training import megatron_ranks, new_model, optimizer_of, run_with

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

TP2, PP2, DP2 = {"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}, {"num_micro_batches": 2}
VIRTUAL = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def same(accelerator: Any, model: Any, kind: str, **options: Any) -> None:
    """Check that the weights are those of a new model."""
    weights, expected = accelerator.get_state_dict(model), new_model(kind, **options).state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], value) for name, value in expected.items()), kind


@megatron_ranks(2)
def test_megatron_core_loads_what_is_written(rank: int, world: int, tmp_path: Path) -> None:
    from accel_integrations.megatron.core import load, on_device

    for number, (kind, written, read, options) in enumerate((
        ("Llama", TP2, DP2, {}),
        ("GPT2", VIRTUAL, TP2, {}),
        ("Mixtral", EP2, PP2, MIXTRAL),
        ("Llama", PP2, TP2, {"tie_word_embeddings": True}),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        with run_with(MegatronLMPlugin(**written)) as accelerator:
            model = accelerator.prepare(new_model(kind, **options))
            model.iteration = 7
            model.save_checkpoint(folder)
            model.save_checkpoint(folder)  # again: in place of the first
        with run_with(MegatronLMPlugin(**read)) as accelerator:
            model = accelerator.prepare(new_model(kind, seed=1, **options))
            with on_device(torch.device("cpu")), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                states = {str(index): chunk.sharded_state_dict() for index, chunk in enumerate(model.chunks)}
                loaded = load("dist_checkpointing").load(states, str(folder / "iter_0000007"))
            for index, chunk in enumerate(model.chunks):
                chunk.load_state_dict(loaded[str(index)])
            assert loaded["iteration"] == 7
            same(accelerator, model, kind, **options)
        with run_with(MegatronLMPlugin(**read)) as accelerator:
            model = accelerator.prepare(new_model(kind, seed=1, **options))
            model.load_checkpoint(folder)
            assert model.iteration == 7
            same(accelerator, model, kind, **options)


def write_ranks(folder: Path, model: Any, layout: dict[str, Any], **changes: Any) -> None:
    """Write each rank's file as Megatron-LM's format `torch` has it, with a vocabulary that is padded further."""
    rank = dist.get_rank()
    number = f"{rank:02d}" if "tp_degree" in layout else f"00_{rank:03d}"
    states = []
    for chunk in model.chunks:
        state = dict(chunk.state_dict())
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in state and "tp_degree" not in layout:
                state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, 3))
        if "tp_degree" in layout:  # as with Transformer Engine, which also stores what is no tensor
            state = {
                name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"): value
                for name, value in state.items()
            }
            state["decoder.layers.0.mlp.linear_fc1._extra_state"] = BytesIO(b"anything")
        states.append(state)
    path = folder / "iter_0000003" / f"mp_rank_{number}" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    named = (
        {"model": states[0]} if len(states) == 1 else {f"model{index}": state for index, state in enumerate(states)}
    )
    torch.save(
        {
            "args": Namespace(tensor_model_parallel_size=2),
            "checkpoint_version": 3.0,
            "iteration": 3,
            **named,
            **changes,
        },
        path,
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()


@megatron_ranks(2)
def test_files_of_ranks_are_read(rank: int, world: int, tmp_path: Path) -> None:
    for number, (kind, written, read, options) in enumerate((
        ("Llama", TP2, PP2, {}),
        ("GPT2", PP2, TP2, {}),
        ("Qwen2", VIRTUAL, DP2, {}),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        with run_with(MegatronLMPlugin(**written)) as accelerator:
            write_ranks(folder, accelerator.prepare(new_model(kind, **options)), written)
        with run_with(MegatronLMPlugin(**read)) as accelerator:
            original = new_model(kind, seed=1, **options)
            model, _ = accelerator.prepare(original, optimizer_of(original))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.load_checkpoint(folder / "iter_0000003")
            assert sum("the optimizer starts anew" in str(warning.message) for warning in caught) == (rank == 1)
            same(accelerator, model, kind, **options)


class Evil:
    """Raises when a file with it is unpickled by someone who executes what the file says."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


@megatron_ranks(2)
def test_what_does_not_fit_changes_nothing(rank: int, world: int, tmp_path: Path) -> None:
    with run_with(MegatronLMPlugin(**TP2)) as accelerator:
        model = accelerator.prepare(new_model(num_hidden_layers=3))
        model.save_checkpoint(tmp_path / "layers")
    with run_with(MegatronLMPlugin(**TP2)) as accelerator:
        model = accelerator.prepare(new_model("Qwen2"))
        model.save_checkpoint(tmp_path / "kind")
    with run_with(MegatronLMPlugin(**TP2)) as accelerator:
        model = accelerator.prepare(new_model())
        write_ranks(tmp_path / "old", model, TP2, checkpoint_version=2.0)
        write_ranks(tmp_path / "code", model, TP2, rng_state=Evil())
        write_ranks(tmp_path / "experts", model, TP2)
        if rank == 0:
            model_file = tmp_path / "layers" / "iter_0000000" / "__0_0.distcp"
            (tmp_path / "cut").mkdir()
            for path in (tmp_path / "layers" / "iter_0000000").iterdir():
                (tmp_path / "cut" / path.name).write_bytes(path.read_bytes()[: 100 if path == model_file else None])
            (tmp_path / "experts" / "iter_0000003" / "mp_rank_00_000_001").mkdir()
            (tmp_path / "no number").mkdir()
            (tmp_path / "no number" / "latest_checkpointed_iteration.txt").write_text("last")
        dist.barrier()
        for name, error, words in (
            ("none", FileNotFoundError, "There is no folder .*none"),
            ("old/iter_0000003/mp_rank_00", FileNotFoundError, "has neither .metadata"),
            ("no number", ValueError, "has 'last', not the number of an iteration"),
            ("layers", ValueError, r"\[3, 32\].* has \[4\] layers"),
            (
                "kind",
                ValueError,
                "has decoder.layers.self_attention.linear_qkv.bias, which the model that was prepared lacks",
            ),
            ("cut", ValueError, "is truncated"),
            ("old", ValueError, "checkpoint_version=2.0"),
            ("code", ValueError, "more than plain data, and nothing of it was executed"),
            ("experts", ValueError, "mp_rank_00_000_001 is of a mixture of experts"),
        ):
            with pytest.raises(error, match=words):
                model.load_checkpoint(tmp_path / name)
        same(accelerator, model, "Llama")
