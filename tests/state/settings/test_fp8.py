"""FP8 recipes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from accel_state.errors import MissingLibraryError
from accel_state.settings.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.libraries.is_transformer_engine_available", lambda: True)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    class Float8LinearConfig(dict[str, Any]):
        """Stands for torchao's class, which compares by value too."""

    module = ModuleType("torchao.float8")
    module.Float8LinearConfig = Float8LinearConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    monkeypatch.setattr("accel_state.libraries.is_torchao_available", lambda: True)


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_defaults_and_words() -> None:
    recipe = TERecipeKwargs(fp8_format="hybrid", amax_compute_algo="MAX")  # type: ignore[arg-type]
    assert vars(recipe) == {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }
    assert recipe.to_kwargs() == {"amax_compute_algo": "max"}


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_overrides_come_from_three_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_DGRAD", "true")
    assert TERecipeKwargs().override_linear_precision == (False, True, False)
    assert TERecipeKwargs().to_kwargs() == {"override_linear_precision": (False, True, False)}
    with pytest.raises(ValueError, match="one bool, or three"):
        TERecipeKwargs(override_linear_precision=(True, False))  # type: ignore[arg-type]


@pytest.mark.usefixtures("torchao")
def test_torchao_config_is_made_from_its_switches_and_that_of_the_user_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert AORecipeKwargs().config == {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": True}
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    recipe = AORecipeKwargs()
    assert recipe.config == {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": True}
    assert set(recipe.to_kwargs()) == {"config", "pad_inner_dim"}
    monkeypatch.delenv("ACCELERATE_FP8_PAD_INNER_DIM")
    recipe = AORecipeKwargs(config="mine")  # type: ignore[arg-type]
    assert (recipe.config, recipe.pad_inner_dim) == ("mine", None)
    with pytest.warns(UserWarning, match="pad_inner_dim=True has no effect"):
        AORecipeKwargs(config="mine", pad_inner_dim=True)  # type: ignore[arg-type]


def test_msamp_levels() -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2"
    assert MSAMPRecipeKwargs("O1").to_kwargs() == {"opt_level": "O1"}
    with pytest.raises(ValueError, match="opt_level='O3' .* 'O1', 'O2'"):
        MSAMPRecipeKwargs("O3")  # type: ignore[arg-type]


@pytest.mark.usefixtures("transformer_engine")
def test_the_old_class_chooses_a_backend_and_warns_once() -> None:
    with pytest.warns(FutureWarning, match="Use TERecipeKwargs"):
        recipe = FP8RecipeKwargs(backend="te", margin=2)  # type: ignore[arg-type]
    assert (recipe.backend, recipe.margin, recipe.opt_level) == ("TE", 2, None)
    with pytest.warns(FutureWarning, match="MSAMPRecipeKwargs.*no longer published.*Use AORecipeKwargs"):
        recipe = FP8RecipeKwargs(backend="MSAMP", opt_level="O1")
    assert recipe.to_kwargs()["opt_level"] == "O1"


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_torchao_available", "is_transformer_engine_available", "is_msamp_available"):
        monkeypatch.setattr(f"accel_state.libraries.{name}", lambda: False)
    with pytest.raises(MissingLibraryError, match="AORecipeKwargs needs the library 'torchao'"):
        AORecipeKwargs()
    with pytest.raises(MissingLibraryError, match="TERecipeKwargs needs the library 'transformer-engine'"):
        TERecipeKwargs()
    with pytest.raises(MissingLibraryError, match="transformer-engine"), pytest.warns(FutureWarning):
        FP8RecipeKwargs()
    with pytest.raises(ValueError, match="backend='AO' .* 'MSAMP', 'TE'"):
        FP8RecipeKwargs(backend="AO")  # type: ignore[arg-type]
