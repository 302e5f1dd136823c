"""Linear layers that compute in 8-bit floats with torchao."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_state.libraries import torchao_required

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

BLOCK = 16  # sizes that 8-bit matrix products take are multiples of it


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the first and the last linear layer of a model, which do not compute well in 8 bits.

    Args:
        model: The model.

    Returns:
        The two names, None and None for a model without linear layers.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Whether a layer may compute in 8-bit floats: a linear one whose sizes are multiples of 16.

    Args:
        module: The layer.
        fqn: Its name in the model.
        layers_to_filter: Names of layers that may not.
    """
    if not isinstance(module, nn.Linear) or fqn in layers_to_filter:
        return False
    return module.in_features % BLOCK == 0 and module.out_features % BLOCK == 0


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """As `filter_linear_layers`, with the first and the last linear layer inside the module itself excluded.

    Args:
        module: The layer.
        fqn: Its name in the model.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Let the linear layers of a model compute in 8-bit floats; parameters stay what they are. Changes `model`.

    Args:
        model: The model.
        config (`torchao.float8.Float8LinearConfig`, *optional*): How tensors are scaled; on a machine without hardware
            for it, `Float8LinearConfig(emulate=True)` computes the same in float32.
        module_filter_func (function, *optional*): Takes a module and its name, says whether it is converted. When None,
            all linear layers but the first and the last are, as far as their sizes are multiples of 16.

    Raises:
        MissingLibraryError: When torchao is not installed.

    Example:
        ```py
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8))
        convert_model_to_fp8_ao(model)  # the layer in the middle
        ```
    """
    from torchao.float8.float8_linear_utils import convert_to_float8_training

    module_filter = module_filter_func
    if module_filter is None:
        module_filter = partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    convert_to_float8_training(model, module_filter_fn=module_filter, config=config)


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether layers of a model compute in 8-bit floats with torchao.

    Args:
        model: The model.

    Raises:
        MissingLibraryError: When torchao is not installed.
    """
    layers: Any = sys.modules.get("torchao.float8.float8_linear")  # not imported: there can be none
    return layers is not None and any(isinstance(module, layers.Float8Linear) for module in model.modules())
