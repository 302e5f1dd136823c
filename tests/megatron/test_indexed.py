"""Megatron-LM's indexed datasets under Megatron-LM: files of tokens, read by a `MegatronLMDummyDataLoader`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from accelerate.utils import GPTTrainStep, MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin
from tests.megatron.test_bert import new_bert
from tests.megatron.training import TOKENS, megatron_ranks, new_model, optimizer_of, run_with

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

LENGTH, TOKENS_OF_ONE = 8, 21
TEXT, OTHER_TEXT = range(40), range(40, TOKENS)
SPLIT = "80,10,10"


def write_tokens(prefix: Path, tokens: range) -> None:
    """Documents as Megatron-LM's preprocess_data.py writes them: each repeats a token of its own."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for token in tokens:
        builder.add_document(torch.full((TOKENS_OF_ONE,), token), [TOKENS_OF_ONE])
    builder.finalize(f"{prefix}.idx")


def wait() -> None:
    torch.distributed.barrier()


def tokens_in(loader: Any) -> set[int]:
    return {token for batch in loader for token in batch["tokens"].flatten().tolist()}


def loss_of(model: Any, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), following.flatten())


@megatron_ranks(2)
def test_files_of_tokens_are_read_and_trained_on(rank: int, world: int, tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    if rank == 0:
        write_tokens(prefix, TEXT)
    wait()
    options = {"data_path": str(prefix), "splits_string": SPLIT, "seq_length": LENGTH, "micro_batch_size": 2}
    seen: dict[str, list[list[int]]] = {}
    for layout in (
        {"tp_degree": 2},
        {"pp_degree": 2},
        {},
        {"context_parallel_size": 2},
        {"tp_degree": 2, "custom_train_step_class": GPTTrainStep},
    ):
        replicas = 2 if not layout else 1
        plugin = MegatronLMPlugin(num_micro_batches=4 // replicas, eval_iters=2, **layout)  # type: ignore[arg-type]
        dummy = MegatronLMDummyDataLoader(**options)
        with run_with(plugin) as accelerator:
            plugin.megatron_dataset_flag = True  # as the guide of accelerate 1.15 says
            model = new_model(eos_token_id=None)
            optimizer = optimizer_of(model)
            scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=5 * replicas)
            model, optimizer, scheduler, *loaders = accelerator.prepare(
                model, optimizer, scheduler, dummy, dummy, dummy
            )
            assert len(loaders) == 3
            batch = next(loaders[0])
            assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
                ("tokens", "labels", "loss_mask", "position_ids"), (8 // replicas, LENGTH)
            )
            assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
            loss = model(**batch).loss
            every = accelerator.gather(batch) if replicas > 1 else batch
            expected = loss_of(new_model(), every["tokens"], every["labels"])
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5), layout
            batches = [batch["tokens"]] + [next(loaders[0])["tokens"] for _ in range(4)]
            with pytest.raises(StopIteration):
                next(loaders[0])
            read = [accelerator.gather(one) if replicas > 1 else one for one in batches]
            seen[str(layout)] = [row for step in read for row in sorted(step.tolist())]
            model.eval()
            losses = [model(**next(loaders[1])).loss.item() for _ in range(2)]
            assert all(0 < one < 10 for one in losses)
            held = [tokens_in(loader) for loader in loaders]
            assert all(held)
            documents = (range(32), range(32, 36), range(36, 40))
            assert all(one <= set(part) for one, part in zip(held, documents, strict=True))
    whole, *others = seen.values()
    assert all(other == whole for other in others), "the same samples in the same steps, whatever the layout"


@megatron_ranks(2)
def test_several_files_are_mixed(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        write_tokens(tmp_path / "a", TEXT)
        write_tokens(tmp_path / "b", OTHER_TEXT)
    wait()
    weighted = ["3", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    apart = {"train_data_path": str(tmp_path / "a"), "valid_data_path": [str(tmp_path / "b")]}
    for paths, num_loaders in (({"data_path": weighted, "split": "1,0,0"}, 1), (apart, 2)):
        dummy = MegatronLMDummyDataLoader(
            seq_length=LENGTH, micro_batch_size=4, data_cache_path=str(tmp_path / str(num_loaders)), **paths
        )
        with run_with(MegatronLMPlugin(tp_degree=2, train_iters=10, eval_iters=2)) as accelerator:
            model = new_model()
            model, _, *loaders = accelerator.prepare(model, optimizer_of(model), *[dummy] * num_loaders)
            found = [tokens_in(loader) for loader in loaders]
            others = [len(one & set(OTHER_TEXT)) / len(one) for one in found]
            assert (0 < others[0] < 1) if num_loaders == 1 else others == [0, 1]
            assert model(**next(loaders[0])).loss.item() > 0
        assert list((tmp_path / str(num_loaders)).glob("*.npy"))


@megatron_ranks(2)
def test_what_cannot_be_read_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    prefix, cache = tmp_path / "text", tmp_path / "planted"
    if rank == 0:
        write_tokens(prefix, TEXT)
        cache.mkdir()
        np.save(cache / "index.npy", np.array([{"an": "object"}]), allow_pickle=True)
    wait()
    good = {"data_path": str(prefix), "seq_length": LENGTH, "micro_batch_size": 2}
    for words, kind, change in (
        ("'tokenizer_type', which indexed datasets do not take", ValueError, {"tokenizer_type": "x"}),
        ("seq_length=None", ValueError, {"seq_length": None}),
        ("There is no .*missing.bin", FileNotFoundError, {"data_path": str(tmp_path / "missing")}),
        ("needs data_path", ValueError, {"data_path": None}),
        ("split='969, 30, 1' leaves one part of the 40 documents", ValueError, {}),
        ("needs data_path", ValueError, {"test_data_path": str(prefix)}),
        (r"index.npy is no array of numbers.*Delete it", ValueError, {"data_cache_path": str(cache)}),
    ):
        with pytest.raises(kind, match=words), run_with(MegatronLMPlugin(tp_degree=2, train_iters=1)) as accelerator:
            accelerator.prepare(new_model(), MegatronLMDummyDataLoader(**good | change))
    bert = new_bert("BertForMaskedLM")
    with run_with(MegatronLMPlugin(tp_degree=2, train_iters=1)) as accelerator:
        with pytest.raises(NotImplementedError, match="predict the next token only"):
            accelerator.prepare(bert, MegatronLMDummyDataLoader(**good, split=SPLIT))
        assert not any(parameter.is_meta for parameter in bert.parameters())
    with run_with(MegatronLMPlugin(tp_degree=2, sequence_parallelism=True)) as accelerator:
        model = new_model()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        tokens = torch.ones(2, 5, dtype=torch.long)
        for words, batch in (
            ("without 'labels'", {"tokens": tokens}),
            ("with 'text'", {"tokens": tokens, "labels": tokens, "text": tokens}),
            ("tokens has 5 tokens per sample.*a multiple of 2", {"tokens": tokens, "labels": tokens}),
        ):
            with pytest.raises(ValueError, match=words):
                model(**batch)
