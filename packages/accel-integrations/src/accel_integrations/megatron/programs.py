"""Functions and classes of the program that replace parts of a training step, as Megatron-LM calls them."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_integrations.megatron.data.tasks import Causal, Classified, Masked, MicroBatch, SequenceToSequence, Task
from accel_state.settings.megatron_models import find_parser

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.megatron.families.shape import ModelShape
    from accel_integrations.megatron.groups import Degrees
    from accel_state.settings.megatron import MegatronLMPlugin


ForwardStep = Callable[[Iterator[MicroBatch], Any], tuple[Any, Callable[[Any], tuple[Any, ...]]]]


@dataclass(frozen=True)
class Hooks:
    """What the program does itself; None for what is done here.

    Args:
        loss: The loss of a micro-batch from which tokens count, bool (B, S), and their losses, (B, S).
        get_batch: The next micro-batch from an iterator over those that the program passed, as dicts.
        forward_step: From that iterator and the model to an output, and a function of its loss.
        handler: The object of `custom_train_step_class`.
    """

    loss: Callable[[Tensor, Any], tuple[Any, ...]] | None = None
    get_batch: Callable[[Iterator[MicroBatch]], MicroBatch] | None = None
    forward_step: ForwardStep | None = None
    handler: Any = None

    @property
    def reads_batches(self) -> bool:
        """Whether the program reads micro-batches itself."""
        return self.get_batch is not None or self.forward_step is not None

    @property
    def averages_micro_batches(self) -> bool:
        """Whether the loss of a step is the mean of the micro-batches' losses, not of the tokens'."""
        return self.loss is not None or self.forward_step is not None

    @classmethod
    def of(cls, plugin: MegatronLMPlugin, task: Task, arguments: Callable[[], Any]) -> Hooks:
        """Those of a plugin.

        Args:
            plugin: The plugin.
            task: What the model reads and gives.
            arguments: Makes what `custom_train_step_class` is told of the run.

        Raises:
            ValueError: For hooks that cannot be combined, or are not for this kind of model.
            TypeError: `custom_train_step_class` has no `forward_step`.
        """
        own_loss, own_batch, kind = (
            plugin.custom_loss_function,
            plugin.custom_get_batch_function,
            plugin.custom_train_step_class,
        )
        named = {"custom_loss_function": own_loss, "custom_get_batch_function": own_batch}
        hook_names = [name for name, value in named.items() if value is not None]
        if kind is None:
            if plugin.custom_train_step_kwargs:
                raise ValueError(
                    f"custom_train_step_kwargs={plugin.custom_train_step_kwargs!r} has no effect without "
                    "custom_train_step_class. Set both or neither."
                )
            if hook_names and not isinstance(task, Causal):
                raise ValueError(
                    f"MegatronLMPlugin.{hook_names[0]} is for models that predict the next token. Set custom_train_step_class, "
                    "whose forward_step computes everything."
                )
            return cls(own_loss and _loss_of(own_loss), own_batch and _batches_of(own_batch))
        if hook_names:
            raise ValueError(
                f"MegatronLMPlugin.{hook_names[0]} has no effect with custom_train_step_class, whose forward_step reads batches and "
                "computes losses. Set one of them."
            )
        handler = _made(kind, arguments, plugin.custom_train_step_kwargs or {})
        forward_step = getattr(handler, "forward_step", None)
        if not callable(forward_step):
            raise TypeError(
                f"custom_train_step_class={kind.__name__} makes objects whose forward_step is {forward_step!r}. Set it to a "
                "function of an iterator and the model that returns the output and a function of its loss."
            )
        return cls(forward_step=_forward_of(forward_step), handler=handler)


def _made(kind: Callable[..., Any], arguments: Callable[[], Any], options: dict[str, Any]) -> Any:
    """The object of a program's class, which may take the arguments of the run first, as with Megatron-LM, or not."""
    try:
        inspect.signature(kind).bind(None, **options)
    except TypeError:
        return kind(**options)
    return kind(arguments(), **options)


def _loss_of(function: Callable[..., Any]) -> Callable[[Tensor, Any], tuple[Any, ...]]:
    """The loss of a micro-batch that a function of the program computes, which counts as one whatever its tokens."""

    def loss(loss_mask: Tensor, losses: Any) -> tuple[Any, ...]:
        value, shown = function(loss_mask.float(), losses)
        return _as_one(value, shown)

    return loss


def _as_one(loss: Tensor, shown: dict[str, Any]) -> tuple[Any, ...]:
    extra = {name: value.detach().clone() for name, value in shown.items() if isinstance(value, Tensor)}
    one = loss.new_ones((), dtype=torch.int)
    return loss, one, extra | {"loss": loss.detach().clone(), "count": one}


def _batches_of(function: Callable[..., Any]) -> Callable[[Iterator[MicroBatch]], MicroBatch]:
    """A reader of micro-batches from one that returns what Megatron-LM's do for GPT."""

    def get_batch(batches: Iterator[MicroBatch]) -> MicroBatch:
        values = tuple(function(batches))
        if len(values) != 5:
            raise ValueError(
                f"custom_get_batch_function returned {len(values)} values. Return tokens, labels (the next tokens), loss_mask, "
                "attention_mask (True where a token does not see another) and position_ids."
            )
        tokens, labels, loss_mask, attention_mask, positions = values
        return {
            "tokens": tokens,
            "labels": labels.clamp(min=0),
            "loss_mask": loss_mask.bool(),
            "attention_mask": attention_mask.bool(),
            "positions": positions,
        }

    return get_batch


def _forward_of(function: Callable[..., Any]) -> ForwardStep:
    """A step of the program, whose function of the loss returns the loss and losses to show by name."""

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
        output, loss_function = function(batches, model)

        def loss(output: Any) -> tuple[Any, ...]:
            outcome = loss_function(output)
            return _as_one(outcome[0], outcome[-1])

        return output, loss

    return forward_step


KINDS = {Causal: "gpt", Masked: "bert", Classified: "bert", SequenceToSequence: "t5"}
"""Megatron-LM's names of kinds of models, by what they read and give."""


def run_arguments(plugin: MegatronLMPlugin, model: nn.Module, shape: ModelShape, degrees: Degrees) -> Namespace:
    """The Megatron-LM-style `args` passed to `custom_train_step_class`.

    Args:
        plugin: The settings of the run; its own arguments take precedence.
        model: The model of transformers.
        shape: Its sizes.
        degrees: The parallelism degrees.
    """
    config: Any = model.config
    with suppress(ValueError):  # a family that accelerate 1.15 does not know
        find_parser(config.model_type)(plugin, model, None)
    arguments = {
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "data_parallel_size": degrees.data,
        "context_parallel_size": degrees.context,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_length,
        "orig_vocab_size": shape.num_tokens,
        "padded_vocab_size": shape.num_rows(degrees),
        "vocab_file": None,
        "eos_token_id": _first(getattr(config, "eos_token_id", None)),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "model_type_name": KINDS[type(shape.task)],
        "model_return_dict": getattr(config, "return_dict", True),
        "pretraining_flag": not isinstance(shape.task, Classified),
        "num_labels": config.num_labels,
        "bert_binary_head": "next_sentence_label" in shape.task.names,
        "return_logits": False,  # losses alone are computed in training
    }
    return Namespace(**plugin.megatron_lm_default_args | arguments | (plugin.other_megatron_args or {}))


def _first(tokens: int | list[int] | None) -> int | None:
    """The token that ends a text; of several, the first."""
    return tokens[0] if isinstance(tokens, list) else tokens
