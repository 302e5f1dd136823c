"""One process: nothing differs from plain torch."""

from __future__ import annotations

import pytest
import torch

from accel_integrations.engines.single import SingleEngine
from accel_state.mesh_axes import DataShard
from tests.integrations.training import loss_of, new_batch, new_engine, new_model, prepare


def test_training_is_that_of_plain_torch() -> None:
    engine = new_engine()
    assert isinstance(engine, SingleEngine)
    model, alone = new_model(), new_model()
    model, optimizer = prepare(engine, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    by_hand = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for step in range(4):
        batch = new_batch(5, seed=step)
        engine.backward(loss_of(model, batch))
        loss_of(alone, batch).backward()
        norm = engine.clip_grad_norm_(model.parameters(), 0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        engine.clip_grad_value_(model.parameters(), 0.01)
        torch.nn.utils.clip_grad_value_(alone.parameters(), 0.01)
        for one in (optimizer, by_hand):
            one.step()
            one.zero_grad()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_the_model_is_left_as_it_is_and_joining_says_that_it_does_nothing() -> None:
    engine = new_engine()
    model = new_model()
    assert prepare(engine, model) is model
    assert engine.unwrap(model) is model
    assert engine.data_shard() == DataShard(0, 1)
    with engine.no_sync(model):
        pass
    with pytest.warns(UserWarning, match="join_uneven_inputs"), engine.join([], even_batches=True):
        pass
    engine.close()
