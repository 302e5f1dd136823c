"""Errors name the library and the remedy."""

from __future__ import annotations

from accel_state.errors import missing_library


def test_a_missing_library_says_what_needs_it_and_how_to_install_it() -> None:
    error = missing_library("wandb", why="Logging to Weights & Biases")
    assert isinstance(error, ImportError)
    assert error.name == "wandb"
    assert str(error) == (
        "Logging to Weights & Biases needs the library 'wandb', which is not installed. Run: pip install wandb"
    )
    assert str(missing_library("torchdata", extra="stateful")).endswith("pip install 'accelerate[stateful]'")
