"""Other packages take part when a process group begins."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import accelerate
from accel_ops.watch import this_process
from accel_state import group_events


def test_the_umbrella_has_ranks_watched() -> None:
    assert accelerate.PartialState
    assert this_process in group_events.observers()


def test_a_module_is_registered_once_and_imported_when_a_group_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_events, "_modules", [])
    group_events.on_group_started("observer_of_groups")
    group_events.on_group_started("observer_of_groups")
    module = ModuleType("observer_of_groups")
    monkeypatch.setitem(sys.modules, "observer_of_groups", module)
    assert group_events.observers() == [module]
