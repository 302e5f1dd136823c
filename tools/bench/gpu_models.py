"""The models of the figures: blocks of linear layers, and Llamas with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tools.bench.gpu_measure import Scale

VOCABULARY = 32_000


class Block(nn.Module):
    """A few layers that stay on one device."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them, each beside a shortcut."""
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.01
        return x


def blocks(width: int, count: int, layers: int) -> nn.Sequential:
    """So many blocks, on the default device."""
    return nn.Sequential(*[Block(width, layers) for _ in range(count)])


def has_transformers() -> bool:
    """Whether there are Llamas."""
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def llama(scale: Scale, hidden: int, intermediate: int, layers: int, heads: int = 32, dtype: Any = None) -> Any:
    """A Llama on the device, always with the same weights; of two small layers where figures mean nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=scale.size(hidden, 64), intermediate_size=scale.size(intermediate, 128),
        num_hidden_layers=scale.size(layers, 2), num_attention_heads=scale.size(heads, 4),
        num_key_value_heads=scale.size(heads // 4, 2), vocab_size=scale.size(VOCABULARY, 256),
        max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = LlamaForCausalLM(config)
    return model if dtype is None else model.to(dtype)


def tokens(scale: Scale, batch: int, length: int) -> torch.Tensor:
    """Random tokens on the device."""
    shape = (scale.size(batch, 1), scale.size(length, 16))
    return torch.randint(1, scale.size(VOCABULARY, 256), shape, device=scale.device)


def num_bytes_of(model: nn.Module) -> int:
    """The size of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())
