"""Data loader settings."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.data import DataLoaderConfiguration


def test_defaults() -> None:
    assert vars(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
        "already_sharded": False,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"even_batches": 2}, "even_batches=2 .* true or false"),
        ({"dispatch_batches": "main"}, "dispatch_batches='main'"),
        ({"data_seed": 1.5}, "data_seed=1.5 .* integer"),
        ({"data_seed": 2**64}, "data_seed=18446744073709551616 .* integer from"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoaderConfiguration(**given)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="prefetch"):
        DataLoaderConfiguration(prefetch=2)  # type: ignore[call-arg]


def test_stateful_loaders_need_no_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.libraries.is_torchdata_stateful_dataloader_available", lambda: False)
    assert DataLoaderConfiguration(use_stateful_dataloader=True).use_stateful_dataloader
