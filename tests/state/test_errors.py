"""Errors name the library and the remedy."""

from __future__ import annotations

import pytest

from accel_state.errors import DistributedOperationException, MissingLibraryError, missing_library


def test_a_missing_library_says_what_needs_it_and_how_to_install_it() -> None:
    error = missing_library("wandb", why="Logging to Weights & Biases")
    assert isinstance(error, ImportError)
    assert error.name == "wandb"
    assert str(error) == (
        "Logging to Weights & Biases needs the library 'wandb', which is not installed. Run: pip install wandb"
    )


def test_an_extra_is_preferred() -> None:
    assert str(missing_library("torchdata", extra="stateful")).endswith("pip install 'accelerate[stateful]'")


def test_they_can_be_caught_by_their_usual_base() -> None:
    with pytest.raises(ImportError):
        raise MissingLibraryError("x")
    assert issubclass(DistributedOperationException, Exception)
