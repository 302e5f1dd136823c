"""Which library computes in 8-bit floats."""

from __future__ import annotations

import os
from pkgutil import resolve_name
from typing import Any

from accel_integrations.precision.precision import Precision
from accel_state.libraries import is_torchao_available
from accel_state.settings.handlers import Handlers

VARIABLE = "ACCELERATE_FP8_BACKEND"
BACKENDS = {
    "AO": "accel_integrations.precision.torchao:TorchAOPrecision",
    "TE": "accel_integrations.precision.transformer_engine:TransformerEnginePrecision",
    "MSAMP": None,
}
"""Precision class by library; None for one that is no longer published."""


def float8_backend(recipe: Any) -> str:
    """The library of a run: that of the recipe, else what `ACCELERATE_FP8_BACKEND` says, else the one that is installed.

    Args:
        recipe: The recipe, None where none was given.

    Raises:
        ValueError: For a library that is not known.
    """
    if recipe is not None:
        return str(getattr(recipe, "backend", None) or type(recipe).__name__.removesuffix("RecipeKwargs"))
    named = os.environ.get(VARIABLE, "").upper()
    if named and named not in BACKENDS:
        raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]!r} is not valid. Choose from {', '.join(BACKENDS)}.")
    return named or ("AO" if is_torchao_available() else "TE")


def make_float8_precision(device_type: str, handlers: Handlers) -> Precision:
    """The precision object for `mixed_precision="fp8"`.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold a recipe, and how autocast behaves.

    Raises:
        MissingLibraryError: When the library is not installed.
        NotImplementedError: For MS-AMP.
    """
    backend = float8_backend(handlers.fp8)
    where = BACKENDS[backend]
    if where is None:
        raise NotImplementedError(
            f"{backend} cannot be used for training: MS-AMP is no longer developed or published. Use AORecipeKwargs "
            "(torchao) or TERecipeKwargs (Transformer Engine) instead."
        )
    precision: Precision = resolve_name(where)(device_type, handlers)
    return precision
