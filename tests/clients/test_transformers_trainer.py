"""transformers' Trainer in one process: learning, accumulating, evaluating, stopping and going on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.clients import tiny
from tests.clients.trainer import history, make_trainer, weights

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # the library has its own


@pytest.mark.takes_turns
def test_accumulating_equals_the_big_batch(tmp_path: Path) -> None:
    """Batches hold different numbers of tokens, which only the library's num_items_in_batch makes right."""
    whole = make_trainer(tmp_path, per_device_train_batch_size=8, max_steps=6)
    parts = make_trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=6)
    whole.train(), parts.train()
    assert history(parts, "loss") == pytest.approx(history(whole, "loss"), abs=1e-5)
    assert history(parts, "grad_norm") == pytest.approx(history(whole, "grad_norm"), rel=1e-4)
    assert history(whole, "loss")[-1] < history(whole, "loss")[0]


class Regression(nn.Module):
    """A model that knows nothing of num_items_in_batch: the library divides its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(batch, 3) and (batch, 1) to a loss and predictions."""
        found = self.layer(values)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


@pytest.mark.takes_turns
def test_a_model_that_averages_by_itself(tmp_path: Path) -> None:
    values = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    rows = [{"values": row, "labels": row.sum()[None]} for row in values]
    common = {"model": Regression, "train_dataset": rows, "data_collator": None, "max_steps": 4}
    whole = make_trainer(tmp_path, per_device_train_batch_size=8, **common)
    parts = make_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, **common)
    whole.train(), parts.train()
    assert history(parts, "loss") == pytest.approx(history(whole, "loss"), abs=1e-6)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(accumulate: int, tmp_path: Path) -> None:
    settings = {"dropout": 0.1, "save_steps": 5, "max_steps": 12, "gradient_accumulation_steps": accumulate}
    whole = make_trainer(tmp_path, lr_scheduler_type="cosine", count=26, **settings)  # stops amid an epoch
    whole.train()
    resumed = make_trainer(tmp_path, lr_scheduler_type="cosine", count=26, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert history(resumed, "loss") == history(whole, "loss")
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in weights(whole).items())


@pytest.mark.takes_turns
def test_lower_precision(tmp_path: Path) -> None:
    full = make_trainer(tmp_path, max_steps=6)
    half = make_trainer(tmp_path, max_steps=6, bf16=True, bf16_full_eval=False)
    full.train(), half.train()
    assert half.accelerator.mixed_precision == "bf16"
    assert {tensor.dtype for tensor in weights(half).values()} == {torch.float32}
    assert history(half, "loss") != history(full, "loss")
    assert history(half, "loss") == pytest.approx(history(full, "loss"), rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [13, 16])
def test_predictions_are_those_of_the_samples_in_their_order(count: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=tiny.Sequences(count), per_device_eval_batch_size=4)
    predicted = trainer.predict(tiny.Sequences(count))
    longest = max(len(row) for row in tiny.Sequences(count).rows)
    assert predicted.predictions.shape == (count, longest, 64)
    assert predicted.label_ids.shape == (count, longest)
    model = tiny.llama().eval()
    total = 0.0
    for start in range(0, count, 4):
        batch = tiny.pad([tiny.Sequences(count)[index] for index in range(start, min(start + 4, count))])
        with torch.no_grad():
            found = model(**batch)
        total += found.loss.item() * len(found.logits)
        for index, logits in enumerate(found.logits, start):
            row = tiny.Sequences(count).rows[index]
            torch.testing.assert_close(torch.from_numpy(predicted.predictions[index, : len(row)]), logits[: len(row)])
            assert predicted.label_ids[index, : len(row)].tolist() == row
            assert (predicted.label_ids[index, len(row) :] == -100).all()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_every_sample_is_seen_once_an_epoch(strategy: str, tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.extend(tuple(row["input_ids"]) for row in rows)
        return tiny.pad(rows)

    trainer = make_trainer(
        tmp_path, count=22, data_collator=collate, train_sampling_strategy=strategy, num_train_epochs=2
    )
    trainer.train()
    expected = sorted(map(tuple, tiny.Sequences(22).rows))
    assert sorted(seen[:22]) == sorted(seen[22:]) == expected
    assert (seen[:22] == seen[22:]) is (strategy == "sequential")
    if strategy == "group_by_length":
        lengths = [len(row) for row in seen]
        assert lengths != sorted(lengths, reverse=True), "epochs differ"


@pytest.mark.takes_turns
@pytest.mark.sample(2)
@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}, {"split_batches": True}, {"even_batches": False}])
@pytest.mark.parametrize("streamed", [False, True])
def test_ways_of_sharing_data_change_nothing_for_one_process(
    config: dict[str, bool], streamed: bool, tmp_path: Path
) -> None:
    data = tiny.Stream(18) if streamed else tiny.Sequences(18)
    common = {"train_dataset": data, "max_steps": 9, "train_sampling_strategy": "sequential"}
    plain = make_trainer(tmp_path, **{**common, "train_dataset": tiny.Sequences(18)})
    shared = make_trainer(tmp_path, accelerator_config=config, **common)
    plain.train(), shared.train()
    assert len(history(shared, "loss")) == 9
    assert history(shared, "loss") == history(plain, "loss")


@pytest.mark.takes_turns
def test_training_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    import transformers

    trainer = make_trainer(
        tmp_path,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        eval_dataset=tiny.Sequences(6, start=100),
        learning_rate=0.0,
        max_steps=50,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(set(history(trainer, "eval_loss"))) == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


@pytest.mark.thorough
def test_the_batch_size_that_fits_is_found(tmp_path: Path) -> None:
    sizes: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sizes.append(len(rows))
        if len(rows) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is")
        return tiny.pad(rows)

    trainer = make_trainer(
        tmp_path, data_collator=collate, per_device_train_batch_size=4, max_steps=3, auto_find_batch_size=True
    )
    trainer.train()
    assert [size for size, _ in itertools.groupby(sizes)] == [4, 3]
    assert trainer.state.global_step == len(history(trainer, "loss")) == 3


@pytest.mark.thorough
def test_a_compiled_model(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path, max_steps=4)
    compiled = make_trainer(tmp_path, max_steps=4, torch_compile=True, torch_compile_backend="eager")
    plain.train(), compiled.train()
    assert history(compiled, "loss") == pytest.approx(history(plain, "loss"), abs=1e-5)
    compiled.save_model(str(tmp_path / "saved"))
    from transformers import LlamaForCausalLM

    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights(compiled).items())
