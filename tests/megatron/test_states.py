"""Checkpoints and model folders of Megatron-LM: by the names of the model, for any degrees, and for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import MegatronLMPlugin
from tests.megatron.test_experts import MIXTRAL
from tests.megatron.training import (
    assert_near,
    megatron_ranks,
    new_model,
    new_rows,
    optimizer_of,
    run_with,
    start,
    train,
)
from tests.support.leaks import reset_state

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

TP2 = {"tp_degree": 2, "num_micro_batches": 2}
PP2 = {"pp_degree": 2, "num_micro_batches": 2}
DP2 = {"use_distributed_optimizer": True, "num_micro_batches": 2}


def run(folder: Path, layout: dict[str, Any], kind: str, micro_batch: int, load: bool, **options: Any) -> Any:
    """Train for two steps, after loading or before saving; the losses, and this rank's part of the optimizer's state."""
    rows = new_rows(16, masked=True)
    with run_with(MegatronLMPlugin(**layout)) as accelerator:
        parts = start(accelerator, new_model(kind, seed=int(load), **options), rows, micro_batch, decay=False)
        if load:
            accelerator.load_state(str(folder))
            weights = accelerator.get_state_dict(parts[0])
            saved = load_file(folder / "model.safetensors")
            assert all(torch.equal(weights[name], value) for name, value in saved.items()), layout
            assert parts[3].state_dict()["last_epoch"] in (2, 4)  # two steps, of one or two replicas
        found = train(accelerator, *parts)
        if not load:
            accelerator.save_state(str(folder))
            found = train(accelerator, *parts)
        model = parts[0]
        return found, accelerator.get_state_dict(model)


CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP2 = {"tp_degree": 2, "sequence_parallelism": True}
AFTER = ((TP2, 4), (PP2, 4), (DP2, 2))
AFTER_SEQUENCES = ((CP2, 8), ({"tp_degree": 2}, 8), (PP2, 4), ({}, 4))
AFTER_EXPERTS = ((EP2, 4), (PP2, 4), ({}, 4), (SP2 | EP2, 8), (SP2 | {"expert_tensor_parallel_size": 2}, 8))


@pytest.mark.parametrize(
    ("kind", "options", "before", "micro_batch", "afterwards"),
    [
        ("Llama", {}, TP2, 4, AFTER),
        ("GPT2", {}, PP2, 4, AFTER),
        ("Qwen2", {}, DP2, 2, AFTER),
        ("Llama", {}, CP2 | {"use_distributed_optimizer": True}, 8, AFTER_SEQUENCES),
        ("Mixtral", MIXTRAL, EP2, 4, AFTER_EXPERTS),
    ],
    ids=["tensors", "stages", "replicas", "sequences", "experts"],
)
@megatron_ranks(2)
def test_a_run_goes_on_with_other_degrees(
    rank: int, world: int, tmp_path: Path, kind: str, options: Any, before: Any, micro_batch: int, afterwards: Any
) -> None:
    folder = tmp_path / "state"
    expected, weights = run(folder, before, kind, micro_batch, load=False, **options)
    for layout, micro_batch in afterwards:
        found, loaded = run(folder, layout, kind, micro_batch, load=True, **options)
        assert_near(found, expected, layout, rel=2e-5)
        for name, value in weights.items():
            torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-5)


@megatron_ranks(2)
def test_a_run_goes_on_in_one_process(rank: int, world: int, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    expected, _ = run(folder, TP2, "Llama", 4, load=False)
    model = new_model(seed=5)
    optimizer = optimizer_of(model)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))  # noqa: TID251
    for batch, (loss, norm) in zip(DataLoader(new_rows(16, True), 8), expected, strict=True):  # type: ignore[arg-type]
        ours = model(**batch).loss
        ours.backward()
        before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert (ours.item(), before) == pytest.approx((loss, norm), rel=2e-5), (ours.item(), before, loss, norm)
        optimizer.step()
        optimizer.zero_grad()


def other_engine(engine: str) -> Accelerator:
    """An accelerator without Megatron-LM."""
    options = ENGINES[engine]
    if engine == "a pipeline":
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    if engine.startswith("ZeRO"):
        plugin = DeepSpeedPlugin(gradient_clipping=1.0, **options)
        plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": BATCH // 2}
        return Accelerator(cpu=True, deepspeed_plugin=plugin)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", **options) if options else None
    return Accelerator(cpu=True, fsdp_plugin=plugin)


@contextmanager
def run_under(engine: str, seed: int) -> Iterator[tuple[Accelerator, tuple[Any, ...]]]:
    """A run of an engine, which reads the same samples in each step as those of Megatron-LM here."""
    try:
        accelerator = other_engine(engine)
        size = BATCH // accelerator.engine.data_shard().count
        yield accelerator, start(accelerator, new_model(seed=seed), new_rows(16), size, decay=False)
        accelerator.free_memory()
    finally:
        reset_state()


def mean_losses(accelerator: Accelerator, parts: tuple[Any, ...]) -> list[float]:
    return [accelerator.reduce(torch.tensor(loss), "mean").item() for loss, _ in train(accelerator, *parts)]  # type: ignore[union-attr]


BATCH = 8
ENGINES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP 2, whole": {"state_dict_type": "FULL_STATE_DICT"},
    "FSDP 2, sharded": {"state_dict_type": "SHARDED_STATE_DICT"},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "a pipeline": {},
}


NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.mark.parametrize(
    "engine", [pytest.param(one, marks=NEEDS_DEEPSPEED if one.startswith("ZeRO") else ()) for one in ENGINES]
)
@megatron_ranks(2)
def test_states_of_another_engine_load_and_the_reverse(rank: int, world: int, tmp_path: Path, engine: str) -> None:
    with run_under(engine, seed=0) as (accelerator, parts):
        train(accelerator, *parts)
        accelerator.save_state(str(tmp_path / "theirs"))
        expected = mean_losses(accelerator, parts)
    for layout in (TP2, PP2):
        with run_with(MegatronLMPlugin(**layout)) as accelerator:
            parts = start(accelerator, new_model(seed=1), new_rows(16), BATCH // 2, decay=False)
            accelerator.load_state(str(tmp_path / "theirs"))
            accelerator.save_state(str(tmp_path / f"ours-{next(iter(layout))}"))
            found = [loss for loss, _ in train(accelerator, *parts)]
        assert found == pytest.approx(expected, rel=2e-5), layout
    for name in ("ours-tp_degree", "ours-pp_degree"):
        with run_under(engine, seed=1) as (accelerator, parts):
            accelerator.load_state(str(tmp_path / name))
            found = mean_losses(accelerator, parts)
        assert found == pytest.approx(expected, rel=2e-5), name


@megatron_ranks(2)
def test_nothing_is_lost_on_the_way_into_shards_and_back(rank: int, world: int, tmp_path: Path) -> None:
    for kind, options in (
        ("Llama", {"tie_word_embeddings": False}), ("Qwen2", {"tie_word_embeddings": True}), ("GPT2", {}),
    ):  # fmt: skip
        for name, layout in (("tp", TP2), ("pp", PP2)):
            original = new_model(kind, **options)
            expected = {key: value.clone() for key, value in original.state_dict().items()}
            folder = tmp_path / f"{kind}-{name}"
            with run_with(MegatronLMPlugin(**layout)) as accelerator:
                model = accelerator.prepare(original)
                found = accelerator.get_state_dict(model)
                assert list(found) == list(expected)
                assert all(torch.equal(found[key], value) for key, value in expected.items())
                unwrapped = accelerator.unwrap_model(model)
                assert unwrapped is original
                accelerator.save_model(model, str(folder))
                if accelerator.is_main_process:
                    assert rank == world - 1
                    unwrapped.config.save_pretrained(folder)
                accelerator.wait_for_everyone()
            again = type(original).from_pretrained(folder)
            assert all(torch.equal(again.state_dict()[key], value) for key, value in expected.items())


@megatron_ranks(2)
def test_states_that_cannot_be_loaded_change_nothing(rank: int, world: int, tmp_path: Path) -> None:
    rows = new_rows(8)
    with run_with(MegatronLMPlugin(**TP2)) as accelerator:
        start(accelerator, new_model(num_hidden_layers=2), rows, 4)
        accelerator.save_state(str(tmp_path))
    with run_with(MegatronLMPlugin(**TP2)) as accelerator:
        model, *_ = start(accelerator, new_model(num_hidden_layers=4), rows, 4)
        before = accelerator.get_state_dict(model)
        with pytest.raises(ValueError, match=r"is missing|parameters"):
            accelerator.load_state(str(tmp_path))
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
