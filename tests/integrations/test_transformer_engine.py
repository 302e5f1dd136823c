"""8-bit floats with Transformer Engine, for which a stand-in with its interface serves here: it needs an NVIDIA GPU."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.precision import transformer_engine
from accel_integrations.precision.transformer_engine import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
    make_recipe,
)
from accel_state import libraries
from accel_state.enums import FP8BackendType
from accel_state.errors import MissingLibraryError
from accel_state.settings.fp8 import TERecipeKwargs
from accelerate import Accelerator


class Linear(nn.Linear):
    """The linear layer of the stand-in."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, **kw: Any):
        super().__init__(in_features, out_features, bias, dtype=params_dtype, **kw)
        if not bias:
            del self.bias
            self.bias = torch.empty(0)  # as the library has it

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias if self.bias.numel() else None)


class LayerNorm(nn.LayerNorm):
    """The layer norm of the stand-in."""

    def __init__(self, shape: Any, eps: float = 1e-5, params_dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(shape, eps, dtype=params_dtype, **kwargs)


class DelayedScaling:
    """The recipe of the stand-in, as of version 2: without `interval` and `override_linear_precision`."""

    def __init__(
        self, margin: int = 0, fp8_format: Any = None, amax_history_len: int = 1, amax_compute_algo: str = "max"
    ) -> None:
        self.given = (margin, fp8_format, amax_history_len, amax_compute_algo)


class MXFP8BlockScaling:
    """The recipe of the stand-in for scaled blocks."""

    def __init__(self, margin: int = 0, fp8_format: Any = None) -> None:
        self.given = (margin, fp8_format)


class Format(enum.Enum):
    """Layouts of 8 bits."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any]]:
    """Install the stand-in; the contexts that were entered."""
    entered: list[tuple[bool, Any]] = []

    @contextmanager
    def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
        entered.append((enabled, fp8_recipe))
        yield

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common", RECIPES)
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package: Any = sys.modules["transformer_engine"]
    package.pytorch = sys.modules["transformer_engine.pytorch"]
    package.pytorch.Linear, package.pytorch.LayerNorm = Linear, LayerNorm
    package.pytorch.fp8_autocast = fp8_autocast
    recipes: Any = sys.modules[RECIPES]
    recipes.Format, recipes.DelayedScaling, recipes.MXFP8BlockScaling = Format, DelayedScaling, MXFP8BlockScaling
    for module in (libraries, transformer_engine):
        monkeypatch.setattr(module, "is_transformer_engine_available", lambda: True)
    return entered


RECIPES = "transformer_engine.common.recipe"


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16)), nn.Linear(16, 3)
    )


def test_without_the_library_the_error_says_what_to_install() -> None:
    for call in (convert_model, has_transformer_engine_layers):
        with pytest.raises(MissingLibraryError, match=r"pip install transformer-engine\[pytorch\]"):
            call(new_model())
    with pytest.raises(MissingLibraryError, match="contextual_fp8_autocast"):
        contextual_fp8_autocast(print, None)


def test_layers_are_replaced_around_their_parameters_and_put_back(contexts: Any) -> None:
    model = new_model()
    inputs = torch.randn(2, 16)
    wanted, parameters = model(inputs), dict(model.named_parameters())
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    assert has_transformer_engine_layers(model)
    kinds = [type(module) for module in (model[0], model[1][0], model[1][1], model[2])]  # type: ignore[index]
    assert kinds == [Linear, LayerNorm, Linear, nn.Linear]  # 3 is no multiple of 16
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert model[0].bias is None
    torch.testing.assert_close(model(inputs), wanted, rtol=0, atol=0)
    for linear, norm in ((True, False), (False, True)):  # one kind alone can be replaced, too
        model = new_model()
        convert_model(model, _convert_linear=linear, _convert_ln=norm)
        assert (isinstance(model[0], Linear), isinstance(model[1][0], LayerNorm)) == (linear, norm)


def test_layers_of_the_library_are_not_made_on_the_cpu(contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are meant for accelerators, which the library chooses itself; a model on the meta device stays there."""
    asked: list[Any] = []
    for kind in (Linear, LayerNorm):
        make = kind.__init__

        def noted(self: Any, *args: Any, make: Any = make, **options: Any) -> None:
            asked.append(options.get("device"))
            make(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", noted)
    model = new_model()
    convert_model(model)
    assert asked == [None] * 3
    asked.clear()
    convert_model(new_model().to("meta"))
    assert asked == [torch.device("meta")] * 3
    model(torch.randn(2, 16))


def test_forward_computes_in_8_bits_only_in_training(contexts: list[Any]) -> None:
    model = new_model()
    model.forward = contextual_fp8_autocast(model.forward, "recipe")  # type: ignore[method-assign]
    model(torch.randn(2, 16))
    model.eval()(torch.randn(2, 16))
    assert contexts == [(True, "recipe"), (False, "recipe")]
    contexts.clear()
    apply_fp8_autowrap(new_model().eval(), TERecipeKwargs(use_autocast_during_eval=True))(torch.randn(2, 16))
    assert [enabled for enabled, _ in contexts] == [True]


def test_settings_reach_the_recipe(contexts: Any) -> None:
    recipe = make_recipe(TERecipeKwargs(margin=2, fp8_format="E4M3", amax_history_len=8))
    assert recipe.given == (2, Format.E4M3, 8, "most_recent")
    assert make_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True)).given == (0, Format.HYBRID)
    with pytest.raises(ValueError, match="does not support interval. Leave that out"):
        make_recipe(TERecipeKwargs(interval=4))


def test_models_train(contexts: list[Any]) -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs(margin=1)])
    assert accelerator.fp8_backend is FP8BackendType.TE
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = model.forward
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(5):
        loss = model(torch.ones(2, 16)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert [recipe.given[0] for _, recipe in contexts] == [1] * 5
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward == plain
