"""The model as the program built it, of which only the structure is kept once its weights are in shards."""

from __future__ import annotations

import torch
from torch import nn


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers that are part of the model's state dict, by name."""
    stored, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    return {name: value.detach().cpu().clone() for name, value in stored.items() if name not in parameters}


def drop_values(model: nn.Module) -> None:
    """Replace the parameters of a model by ones without values, tied ones by the same."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replacements:
                empty = torch.empty_like(parameter, device="meta")
                replacements[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = replacements[parameter]
