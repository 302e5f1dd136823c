"""Monkeypatches `scaled_dot_product_attention` in blocks, and checks that models can and do call it.

This is the only place where a function of torch is replaced. A model whose attention does not go through it would see
only its own shard of a sequence and silently train to wrong numbers, so the first forward pass checks that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from accel_integrations.parallel.transformers_plan import transformers_models

Attention = Callable[..., torch.Tensor]

# The beginnings of what configurations of transformers call such layers: states of linear attention and of state-space
# models, blocks that have these beside attention, and convolutions, which look back at the tokens before.
RECURRENT_KINDS = ("linear_attention", "mamba", "recurrent", "hybrid", "conv")


# What the names of transformers' classes say that give one output for each sequence, from its first or last token.
OF_SEQUENCES = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")


class AttentionPatch:
    """Replaces `torch.nn.functional.scaled_dot_product_attention` in blocks, which may be nested.

    Args:
        make: Gets the function that would have been called, and returns the one to call.
    """

    def __init__(self, make: Callable[[Attention], Attention]) -> None:
        self._make = make
        self._depth = 0
        self._before: Attention | None = None
        self.num_calls = 0

    @property
    def is_active(self) -> bool:
        """Whether the function is replaced now."""
        return self._depth > 0

    def enter(self, *_: Any) -> None:
        """Replace the function; takes and ignores what hooks are called with."""
        self._depth += 1
        if self._depth > 1:
            return
        self._before = functional.scaled_dot_product_attention
        attention = self._make(self._before)

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.num_calls += 1
            return attention(*args, **kwargs)

        functional.scaled_dot_product_attention = counted

    def leave(self, *_: Any) -> None:
        """Restore the function."""
        self._depth -= 1
        if self._depth == 0:
            functional.scaled_dot_product_attention = self._before  # type: ignore[assignment]
            self._before = None  # it may hold a mesh

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block in which the function is replaced."""
        self.enter()
        try:
            yield
        finally:
            self.leave()


def check_attention(model: nn.Module, setting: str) -> None:
    """Check that the sequences of a model can be sharded around `scaled_dot_product_attention`.

    Args:
        model: The model.
        setting: The setting that needs it, for the error message.

    Raises:
        ValueError: They cannot; the message names the chosen attention, or the recurrent layers.
    """
    check_no_recurrent_layers(model, setting)
    for inner in transformers_models(model):
        check_outputs_of_tokens(inner, setting)
        chosen = getattr(inner.config, "_attn_implementation", None)
        if chosen == "sdpa":
            continue
        remedy = 'load it with attn_implementation="sdpa", or ' if inner._supports_sdpa else ""
        raise ValueError(
            f"{setting} shards sequences around scaled_dot_product_attention, but {type(inner).__name__} uses "
            f"attn_implementation={chosen!r}: {remedy}choose sp_size instead of cp_size, which keeps a model's attention."
        )


def check_no_recurrent_layers(model: Any, setting: str = "Sequence parallelism") -> None:
    """Check that a model has no recurrent layers, whose state would restart in each shard of a sequence.

    Such a model would silently train to wrong numbers. A model whose configuration names no kinds of layers passes.

    Args:
        model: Usually of transformers: the `layer_types` of its (text) configuration are checked.
        setting: The setting that needs it, for the error message.

    Raises:
        ValueError: It has some; the message names their kinds.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    recurrent = [kind for kind in kinds if str(kind).startswith(RECURRENT_KINDS)]
    if recurrent:
        raise ValueError(
            f"{setting} gives every rank a shard of each sequence, but {type(model).__name__} has layers of the kinds "
            f"{', '.join(map(repr, recurrent))}, whose recurrent state passes from one token to the next and would "
            "restart in each shard. Train it without sharding sequences (sp_size=1, cp_size=1), or choose a model that "
            "has attention only."
        )


def check_outputs_of_tokens(model: Any, setting: str) -> None:
    """Check that a model of transformers gives an output for each token, not one for each sequence.

    Args:
        model: The model.
        setting: The setting that shards sequences, for the error message.

    Raises:
        ValueError: It gives one for each sequence.
    """
    name = type(model).__name__
    if name.endswith(OF_SEQUENCES):
        raise ValueError(
            f"{setting} gives every rank a shard of each sequence, but {name} computes one output for a sequence, from tokens that "
            "one rank alone has. Train it without sharding sequences (sp_size=1, cp_size=1)."
        )


def watch_attention(model: nn.Module, patch: AttentionPatch, setting: str) -> None:
    """Have the model's first forward fail when it does not call the patched function.

    Args:
        model: The model.
        patch: Forward passes while it is not active are not checked.
        setting: The setting that needs it, for the error message.
    """
    calls_before: list[int] = []

    def before(*_: Any) -> None:
        calls_before[:] = [patch.num_calls]

    def after(module: nn.Module, *_: Any) -> None:
        if not patch.is_active or not calls_before:
            return
        if patch.num_calls == calls_before[0]:
            raise RuntimeError(
                f"{setting}: the forward of {type(module).__name__} never called "
                "torch.nn.functional.scaled_dot_product_attention, so that its attention, if it has one, would see "
                "only this rank's shard of the sequence. Use this function for attention, called through the module "
                "torch.nn.functional rather than imported by name before."
            )
        for handle in handles:
            handle.remove()

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
