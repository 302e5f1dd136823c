"""Layers that carry a state from token to token, and so need whole sequences on one process."""

from __future__ import annotations

from typing import Any

# The beginnings of what configurations of transformers call such layers: states of linear attention and of state-space
# models, blocks that have these beside attention, and convolutions, which look back at the tokens before.
RECURRENT_KINDS = ("linear_attention", "mamba", "recurrent", "hybrid", "conv")


def check_no_recurrent_layers(model: Any, setting: str = "Sequence parallelism") -> None:
    """Refuse a model with layers whose state would begin anew on every process that holds a part of a sequence.

    Such a model would train to wrong numbers without a word. A model whose configuration names no kinds of layers passes.

    Args:
        model: Usually of transformers: what counts is the `layer_types` of its (text) configuration.
        setting: What needs it, for the error.

    Raises:
        ValueError: Naming the kinds of layers.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    recurrent = [kind for kind in kinds if str(kind).startswith(RECURRENT_KINDS)]
    if recurrent:
        raise ValueError(
            f"{setting} gives every process a part of each sequence, but {type(model).__name__} has layers of the kinds "
            f"{', '.join(map(repr, recurrent))}, whose state passes from one token to the next and would begin anew in "
            "each part. Train it without sharing sequences (sp_size=1, cp_size=1), or choose a model that has attention "
            "only."
        )
