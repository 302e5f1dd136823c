"""Checks that sharded sequences need no mask but the causal one, and drops the masks that were made from shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.transformers_plan import is_transformers_model, transformers_models

# How transformers configures a layer that attends to the tokens just before alone, and what kinds of layers do.
NARROW = {"sliding_window": "sliding", "attention_chunk_size": "chunked"}
UNSHARDED = "Train it without sharding sequences (cp_size=1, sp_size=1)"


@dataclass(frozen=True)
class HeldTokens:
    """Which tokens of the full sequences this rank holds.

    Attributes:
        group: The process group whose ranks hold all of them.
        indices: Their indices in the full sequence, of shape (local sequence length,).
    """

    group: Any
    indices: torch.Tensor


def tokens_in_order(group: Any, length: int) -> HeldTokens:
    """Those of a rank where rank i of the group holds shard i, each of this length."""
    return HeldTokens(group, torch.arange(length) + dist.get_rank(group) * length)


def check_causal_batches(
    model: nn.Module, setting: str, held: Callable[[int], HeldTokens | None], instead: str
) -> None:
    """Have models of transformers raise an error in forward passes that need another mask than the causal one.

    Args:
        model: Changed in place.
        setting: The setting that needs it, for the error message.
        held: Called with the local sequence length; returns None while sequences are not sharded.
        instead: What can use other masks, as a sentence.
    """
    for inner in transformers_models(model):
        check = _BatchCheck(inner, setting, held, instead)
        inner.register_forward_pre_hook(check, with_kwargs=True)


class _BatchCheck:
    """Looks at the arguments of a forward pass; all ranks that hold shards of a sequence raise the same error."""

    def __init__(self, model: Any, setting: str, held: Callable[[int], HeldTokens | None], instead: str) -> None:
        self.setting = setting
        self.instead = instead
        self.held = held
        self.model_name = type(model).__name__
        self.names = _argument_names(model)
        self.knows_positions = any(
            "position_ids" in _argument_names(module) for module in model.modules() if is_transformers_model(module)
        )
        self.is_causal = any(map(_is_causal, model.modules()))

    @torch.compiler.disable
    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[str, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        inputs: Any = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        held = None if inputs is None else self.held(inputs.shape[1])
        if held is None:
            return
        positions: Any
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        problem = (
            self._problem_of_layers(model.config.get_text_config(), inputs.shape[1] * dist.get_world_size(held.group))
            or self._problem_of_arguments(positions, mask)
            or self._problem_of_tokens(inputs, positions, mask, held)
        )
        if problem:
            raise ValueError(f"{self.setting}: {problem}.")

    def _problem_of_layers(self, config: Any, length: int) -> str | None:
        kinds = " ".join(map(str, getattr(config, "layer_types", None) or NARROW.values()))
        for name, kind in NARROW.items():
            width = getattr(config, name, None)
            if isinstance(width, int) and width < length and kind in kinds:
                return (
                    f"{self.model_name} has {name}={width}, but sharded sequences of {length} tokens are attended to as a "
                    f"whole. {self.instead}, or train with sequences of at most {width} tokens"
                )
        if getattr(config, "alibi", False):
            return f"{self.model_name} adds its positions (ALiBi) to the attention mask, which is dropped. {UNSHARDED}"
        return None

    def _problem_of_arguments(self, positions: Any, mask: Any) -> str | None:
        if not self.knows_positions:
            return f"{self.model_name} takes no position_ids, so that every rank would count its tokens from 0. {UNSHARDED}"
        if positions is None:
            return (
                "the model was called without position_ids, so that every rank would count its tokens from 0. Add "
                "position_ids=torch.arange(sequence_length) to the batch, and shard them as input_ids"
            )
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            return (
                f"attention masks cannot be sharded, but attention_mask is a {_described(mask)}. {self.instead}, or pass one of "
                "shape (batch, sequence) that masks padding at the end"
            )
        return None

    def _problem_of_tokens(
        self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, held: HeldTokens
    ) -> str | None:
        restarts, skips, pads = _irregularities(inputs, positions, mask, held)
        if restarts:
            return (
                "position_ids are not consecutive, as where samples are packed into one sequence, which would attend to each "
                f"other. {self.instead}, or pad samples at their end instead of packing them"
            )
        if skips:
            return (
                "attention_mask masks tokens before others, as where sequences are padded at the beginning, but padding can be "
                f'left out of attention at the end only. {self.instead}, or pad at the end (padding_side="right")'
            )
        if pads and not self.is_causal:
            return (
                "sequences are padded, but attention that is not causal would attend to the padding of other shards. "
                f"{self.instead}, or train with batches of sequences of one length"
            )
        return None


def _argument_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(signature(type(model).forward).parameters)[1:]


def _irregularities(
    inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, held: HeldTokens
) -> list[bool]:
    """Whether positions of tokens are not consecutive, tokens come after masked ones, and any are masked.

    One all-reduce of four numbers per sequence, and one read by the host.
    """
    batch, length = inputs.shape[:2]
    indices = held.indices.to(inputs.device)
    none = torch.iinfo(torch.long).min + 1
    if mask is not None and mask.shape[1] != length:
        mask = mask[:, indices]  # every rank was given the full one
    valid = torch.ones(batch, length, dtype=torch.bool, device=inputs.device) if mask is None else mask.bool()
    positions = positions[0] if positions.ndim == 3 else positions
    offsets, places = (positions.long() - indices).expand(batch, -1), indices.expand(batch, -1)
    extremes = torch.stack(
        [
            offsets.where(valid, none).amax(1),
            (-offsets).where(valid, none).amax(1),
            places.where(valid, none).amax(1),
            (-places).where(~valid, none).amax(1),
        ]
    )
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=held.group)
    most, least, last, first_masked = extremes[0], -extremes[1], extremes[2], -extremes[3]
    irregular: list[bool] = torch.stack(
        [(most > least).any(), (last > first_masked).any(), (first_masked < -none).any()]
    ).tolist()
    return irregular


def drop_masks(model: nn.Module, is_active: Callable[[], bool]) -> None:
    """Have causal attention modules of transformers ignore their mask, and use `is_causal=True` instead.

    The masks they get were made from a shard of the sequence. Padding at the end of a sequence needs none: no token
    before it attends to it.

    Args:
        model: Changed in place, as far as it is one of transformers.
        is_active: Called in every forward pass.
    """

    def without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_active() and "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": None}
        return None

    for inner in transformers_models(model):
        for module in filter(_is_causal, inner.modules()):
            module.register_forward_pre_hook(without_mask, with_kwargs=True)


def check_no_mask(attn_mask: torch.Tensor | None, setting: str) -> None:
    """Reject an attention mask: it was made from a shard of the sequence.

    Raises:
        ValueError: There is one; the message says what to use instead.
    """
    if attn_mask is not None:
        raise ValueError(
            f"{setting} cannot use an attention mask (got one of shape {tuple(attn_mask.shape)}), which would have to "
            "cover full sequences. Call scaled_dot_product_attention with is_causal=True or without mask, and pad "
            "sequences at their end only."
        )


def _is_causal(module: nn.Module) -> bool:
    """Whether a module is causal attention, whose configuration does not make it look both ways."""
    return getattr(module, "is_causal", None) is True and getattr(getattr(module, "config", None), "is_causal", True)


def _described(mask: Any) -> str:
    shape = getattr(mask, "shape", None)
    return type(mask).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
