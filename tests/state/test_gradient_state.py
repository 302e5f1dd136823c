"""Accumulation windows and data loaders."""

from __future__ import annotations

import gc
import weakref

import pytest

from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin


class Loader:
    def __init__(self, remainder: int = 3) -> None:
        self.end_of_dataloader = False
        self.remainder = remainder


def test_a_fresh_state() -> None:
    state = GradientState()
    assert state.initialized
    assert state.sync_gradients
    assert (state.num_steps, state.sync_with_dataloader, state.plugin_kwargs) == (1, True, {})
    assert (state.active_dataloader, state.in_dataloader, state.end_of_dataloader) == (None, False, False)
    assert state.remainder == -1
    assert state.dataloader_references == [None]
    assert not state.is_xla_gradients_synced


def test_all_instances_share_everything() -> None:
    first, second = GradientState(), GradientState()
    first._set_sync_gradients(False)
    assert second.sync_gradients is False
    second.plugin_kwargs.update(num_steps=8)  # transformers does this
    assert first.num_steps == 8


def test_the_last_plugin_counts_and_none_changes_nothing() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False, sync_with_dataloader=False))
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (4, False, False)
    GradientState()
    assert state.num_steps == 4
    GradientState(GradientAccumulationPlugin(num_steps=2))
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (2, True, True)


def test_loaders_may_be_nested() -> None:
    state, outer, inner = GradientState(), Loader(3), Loader(5)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner
    assert state.dataloader_references == [None, outer, inner]
    inner.end_of_dataloader = True
    assert (state.end_of_dataloader, state.remainder) == (True, 5)
    state._remove_dataloader(inner)
    assert (state.end_of_dataloader, state.remainder) == (False, 3)
    state._remove_dataloader(inner)  # a second time does no harm
    state._remove_dataloader(outer)
    assert not state.in_dataloader


def test_the_outer_loader_may_end_first_and_the_inner_one_after_the_state_was_reset() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    state._remove_dataloader(outer)
    assert state.dataloader_references == [None, inner]
    GradientState._reset_state()
    state._remove_dataloader(inner)
    assert not state.initialized


def test_loaders_are_not_kept_alive() -> None:
    state, outer, inner = GradientState(), Loader(3), Loader(5)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    reference = weakref.ref(inner)
    del inner
    gc.collect()
    assert reference() is None
    assert state.active_dataloader is outer  # the iteration of the inner one was left early
    another = Loader(7)
    state._add_dataloader(another)
    assert state.dataloader_references == [None, outer, another]


def test_references_can_be_put_back() -> None:
    state, loader = GradientState(), Loader()
    state.dataloader_references = [None, loader]
    assert state.active_dataloader is loader


def test_xla_gradients_are_always_summed_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    state = GradientState()
    state.is_xla_gradients_synced = True
    assert state.is_xla_gradients_synced
    state.is_xla_gradients_synced = False
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert state.is_xla_gradients_synced


def test_it_prints_what_it_knows_until_it_is_reset() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4))
    assert "Sync Gradients: True" in repr(state)
    assert "'num_steps': 4" in repr(state)
    GradientState._reset_state()
    assert not state.initialized
    assert GradientState().num_steps == 1
