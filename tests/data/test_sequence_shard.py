"""Parts of sequences: what each process gets of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data import device_copies
from accel_data.loader_shard import DataLoaderShard
from accel_data.sequence_shard import SequenceShard, length_of_full


@given(batch=st.integers(1, 3), parts=st.integers(1, 4), per_part=st.integers(1, 5))
def test_parts_put_together_are_the_batch(batch: int, parts: int, per_part: int) -> None:
    length = parts * per_part
    tokens = torch.arange(batch * length).view(batch, length)
    cut = [SequenceShard(index, parts)({"input_ids": tokens, "labels": tokens}) for index in range(parts)]
    assert torch.equal(torch.cat([part["input_ids"] for part in cut], dim=1), tokens)
    positions = torch.cat([part["position_ids"] for part in cut], dim=1)
    assert torch.equal(positions, torch.arange(length).expand(batch, length))
    labels = torch.cat([part["shift_labels"] for part in cut], dim=1)
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert (labels[:, -1] == -100).all()
    assert all(part["labels"] is tokens and "shift_labels" in part for part in cut), "the model shifts them itself"


def test_what_is_given_is_not_made_again() -> None:
    batch = {
        "input_ids": torch.zeros(1, 4, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
        "shift_labels": torch.tensor([[1, 2, 3, 4]]),
    }
    part = SequenceShard(1, 2)(batch)
    assert part["position_ids"].tolist() == [[0, 1]]
    assert part["shift_labels"].tolist() == [[3, 4]]
    assert set(batch) == {"input_ids", "position_ids", "shift_labels"}
    assert batch["input_ids"].shape == (1, 4)


def test_what_has_no_sequence_stays_whole() -> None:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "weight": torch.ones(2), "names": ["a", "b"]}
    part = SequenceShard(0, 2)(batch)
    assert part["weight"].shape == (2,)
    assert part["names"] == ["a", "b"]


def test_a_pair_is_cut_without_additions() -> None:
    inputs, targets = SequenceShard(1, 2)((torch.arange(8).view(2, 4), torch.arange(8).view(2, 4)))
    assert inputs.tolist() == targets.tolist() == [[2, 3], [6, 7]]


def test_features_of_tokens_are_cut_along_the_sequence() -> None:
    (part,) = SequenceShard(0, 2)([torch.zeros(2, 6, 5)])
    assert part.shape == (2, 3, 5)


def test_a_mask_of_padding_at_the_end_is_cut_too() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    part = SequenceShard(1, 2)({"input_ids": tokens, "attention_mask": mask})
    assert part["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_a_mask_of_full_rank_stays_whole() -> None:
    mask = torch.ones(2, 1, 4, 4)
    assert SequenceShard(0, 2)({"input_ids": torch.zeros(2, 4), "attention_mask": mask})["attention_mask"] is mask


def test_shards_are_known_as_such_after_they_were_copied() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    loader = DataLoaderShard([{"input_ids": tokens[0], "labels": tokens[0]}], device="meta", batch_size=1)
    loader.sequence_shard = SequenceShard(0, 2)
    batch = next(iter(loader))
    assert length_of_full(batch["input_ids"]) == length_of_full(batch["position_ids"]) == 4
    assert length_of_full(batch["labels"]) is None
    assert batch["shift_labels"].shape == (1, 2)
    assert batch.get("shift_labels").shape == (1, 2)
    assert batch.get("weights") is None
    assert "shift_labels" not in {**batch}, "the model shifts the full labels"
    with pytest.raises(KeyError, match="weights"):
        batch["weights"]


def test_sequences_that_cannot_be_cut_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="Sequences of 5 tokens cannot be sharded into 2 .* pad_to_multiple_of=2"):
        SequenceShard(0, 2)({"input_ids": torch.zeros(1, 5, dtype=torch.long)})


def test_a_batch_without_sequences_stays_as_it_is() -> None:
    batch = {"number": torch.tensor([1, 2])}
    assert SequenceShard(0, 2)(batch) is batch


@pytest.mark.parametrize("skipped", [0, 1])
def test_batches_are_sharded_before_they_are_moved(monkeypatch: pytest.MonkeyPatch, skipped: int) -> None:
    """On the device, the look at the padding mask would wait for all that was enqueued before."""
    moved: list[Any] = []
    monkeypatch.setattr(device_copies, "send_to_device", lambda batch, *_: moved.append(batch) or batch)
    data = [{"input_ids": torch.arange(4), "attention_mask": torch.ones(4)} for _ in range(4)]
    loader = DataLoaderShard(data, device="meta", batch_size=2, skip_batches=skipped)
    loader.sequence_shard = SequenceShard(1, 2)
    batches = list(loader)
    assert len(moved) == len(batches) == 2 - skipped
    for batch in moved:
        assert batch["input_ids"].tolist() == [[2, 3]] * 2
        assert batch["attention_mask"].tolist() == [[1.0, 1.0]] * 2
    assert batches[0]["position_ids"].tolist() == [[2, 3]] * 2
