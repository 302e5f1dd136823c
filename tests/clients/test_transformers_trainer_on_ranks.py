"""transformers' Trainer on two processes does what it does on one, with batches twice as large."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import tiny
from tests.clients.trainer import history, make_trainer, weights
from tests.support.leaks import reset_state
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("default"),  # the library has its own
]

STEPS = 6
FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def outcome(folder: Path, **options: Any) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few steps."""
    warnings.simplefilter("ignore")
    start_over()
    trainer = make_trainer(folder, **{"max_steps": STEPS, **options})
    trainer.train()
    return history(trainer, "loss"), history(trainer, "grad_norm")


def start_over() -> None:
    """What one Trainer set up does not bind the next one; the processes stay."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


@pytest.fixture(scope="module")
def big_batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """One process, batches of eight."""
    reset_state()
    return outcome(tmp_path_factory.mktemp("one"), per_device_train_batch_size=8)


@pytest.mark.takes_turns
@pytest.mark.sample(2)
@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 8, "accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"dispatch_batches": True}},
        {"accelerator_config": {"dispatch_batches": True, "split_batches": True}, "per_device_train_batch_size": 8},
        {"ddp_find_unused_parameters": True},
        FSDP2,
        {**FSDP2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=["ddp", "accumulating", "split", "dispatched", "dispatched-split", "unused", "fsdp2", "fsdp2-accumulating"],
)
def test_two_processes_train_like_one(
    rank: int, world: int, options: dict[str, Any], big_batch: tuple[list[float], list[float]], tmp_path: Path
) -> None:
    losses, norms = outcome(tmp_path, **options)
    assert losses == pytest.approx(big_batch[0], abs=1e-4)
    assert norms == pytest.approx(big_batch[1], rel=1e-3)


@pytest.mark.takes_turns
@ranks(2)
@pytest.mark.parametrize("split", [False, True])
def test_a_stream_is_shared(rank: int, world: int, split: bool, tmp_path: Path) -> None:
    """Eighteen sequences, batches of eight: the last one is filled up."""
    seen: list[tuple[int, ...]] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.extend(tuple(row["input_ids"]) for row in rows)
        return tiny.pad(rows)

    options = {"train_dataset": tiny.Stream(18), "data_collator": collate, "max_steps": 3}
    config = {"dispatch_batches": False, "split_batches": split}
    size = 8 if split else 4
    losses, _ = outcome(tmp_path, accelerator_config=config, per_device_train_batch_size=size, **options)
    assert len(losses) == 3
    own = [tuple(row) for row in tiny.Sequences(18).rows]
    assert seen[:8] == [*own[4 * rank : 4 * rank + 4], *own[8 + 4 * rank : 12 + 4 * rank]]
    assert len(seen) == 12


@ranks(2)
def test_a_stream_that_one_process_reads(rank: int, tmp_path: Path) -> None:
    """The library's default for streams, with batches padded to their own longest row."""
    whole = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "max_steps": 5}
    indexed = outcome(tmp_path, train_dataset=tiny.Sequences(18), **whole)
    streamed = outcome(tmp_path, train_dataset=tiny.Stream(18), **whole)
    assert streamed[0][:2] == pytest.approx(indexed[0][:2], abs=1e-5)  # the third round is filled up in another way
    assert len(streamed[0]) == 5
    assert streamed[0][-1] < streamed[0][0]


@pytest.mark.takes_turns
@ranks(2)
def test_going_on_is_never_having_stopped(rank: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    common = {"dropout": 0.1, "max_steps": 9, "save_steps": 5, "lr_scheduler_type": "linear", "count": 46}
    whole = make_trainer(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, **common)
    whole.train()
    start_over()
    resumed = make_trainer(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, **common)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert history(resumed, "loss") == history(whole, "loss")
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in weights(whole).items())


@ranks(2)
@pytest.mark.parametrize("count", [13, 16])
def test_predictions_are_those_of_the_samples_in_their_order(rank: int, count: int, tmp_path: Path) -> None:
    """Each process pads to its own longest row, and the last batches are uneven."""
    warnings.simplefilter("ignore")
    data = tiny.Sequences(count)
    trainer = make_trainer(tmp_path, eval_dataset=data, per_device_eval_batch_size=2)
    predicted = trainer.predict(data)
    assert predicted.predictions.shape == (count, max(map(len, data.rows)), 64)
    model = tiny.llama().eval()
    for index, row in enumerate(data.rows):
        with torch.no_grad():
            found = model(torch.tensor([row])).logits[0]
        torch.testing.assert_close(torch.from_numpy(predicted.predictions[index, : len(row)]), found)
        assert predicted.label_ids[index, : len(row)].tolist() == row
        assert (predicted.label_ids[index, len(row) :] == -100).all()


@ranks(2)
def test_lengths_are_grouped_and_metrics_see_every_sample_once(rank: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    counted: list[int] = []

    def count_rows(predicted: Any) -> dict[str, float]:
        counted.append(len(predicted.label_ids))
        return {"rows": float(len(predicted.label_ids))}

    trainer = make_trainer(
        tmp_path,
        count=22,
        train_sampling_strategy="group_by_length",
        num_train_epochs=2,
        eval_dataset=tiny.Sequences(7, start=50),
        eval_strategy="epoch",
        per_device_eval_batch_size=3,
        compute_metrics=count_rows,
    )
    trainer.train()
    assert counted == [7, 7]
    assert trainer.state.global_step == 6
    assert history(trainer, "eval_rows") == [7.0, 7.0]
    assert history(trainer, "loss")[-1] < history(trainer, "loss")[0]
