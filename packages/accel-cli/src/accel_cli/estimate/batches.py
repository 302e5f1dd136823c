"""Batches for a training step: inputs and labels of the right shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel_cli.errors import UsageError

DEFAULT_SEQUENCE_LENGTH = 512
DEFAULT_IMAGE_SIZE = 224
NUM_CHOICES = 4
LABEL_SHAPES: dict[str, str] = {  # end of the class name -> dimensions; (examples, tokens) for the rest
    "ForSequenceClassification": "examples",
    "ForImageClassification": "examples",
    "ForAudioClassification": "examples",
    "ForMultipleChoice": "examples",
    "ForSemanticSegmentation": "examples height width",
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, and its loss function.

    Attributes:
        loss: Computes the loss, a 0-dim tensor, from the outputs of the model.
        args: Positional arguments of the model's forward.
        kwargs: Keyword arguments of the model's forward.
    """

    loss: Callable[[Any], torch.Tensor]
    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of the batch.

    Attributes:
        examples: Number of examples.
        tokens: Sequence length; None for 512, or the model's maximum if that is less.
    """

    examples: int = 1
    tokens: int | None = None


def transformers_batch(model: nn.Module, size: BatchSize) -> Batch:
    """Make a batch for a model of transformers.

    Raises:
        UsageError: Its main input is not supported.
    """
    config: Any = model.config
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input not in INPUTS:
        raise UsageError(
            f"--training is not possible for {type(model).__name__}: its main input is {main_input!r}, which is not one of "
            f"{', '.join(INPUTS)}. Estimate without --training."
        )
    parameters = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {main_input: INPUTS[main_input](config, size)}
    if "return_loss" in parameters and {"input_ids", "pixel_values"} <= parameters.keys():  # texts against images
        kwargs |= {name: INPUTS[name](config, size) for name in ("input_ids", "pixel_values")} | {"return_loss": True}
    if type(model).__name__.endswith("ForMultipleChoice"):
        kwargs[main_input] = kwargs[main_input].unsqueeze(1).repeat(1, NUM_CHOICES, 1)
    tokens = _num_tokens(config, size)
    if "labels" in parameters:
        kwargs["labels"] = _labels(model, size.examples, tokens, tuple(kwargs[main_input].shape))
    for name in ("start_positions", "end_positions", "next_sentence_label"):
        if name in parameters:
            kwargs[name] = torch.zeros(size.examples, dtype=torch.long)
    if "decoder_input_ids" in parameters and "labels" not in parameters:
        kwargs["decoder_input_ids"] = torch.zeros(size.examples, tokens, dtype=torch.long)
    return Batch(_loss_of_transformers, kwargs=kwargs)


def image_batch(model: nn.Module, size: BatchSize) -> Batch:
    """Make a batch for a model of timm: images, and the cross entropy with one label each."""
    settings: Any = getattr(model, "pretrained_cfg", {}) or {}
    shape = settings.get("input_size", (3, DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE))
    labels = torch.zeros(size.examples, dtype=torch.long)

    def loss(outputs: Any) -> torch.Tensor:
        if getattr(model, "num_classes", 0):
            return nn.functional.cross_entropy(outputs, labels)
        return _mean(outputs)

    return Batch(loss, args=(torch.zeros(size.examples, *shape),))


def _num_tokens(config: Any, size: BatchSize) -> int:
    longest = _first(config, "max_position_embeddings", "n_positions", "max_target_positions", default=None)
    wanted = size.tokens or min(DEFAULT_SEQUENCE_LENGTH, longest or DEFAULT_SEQUENCE_LENGTH)
    if longest is not None and wanted > longest:
        raise UsageError(f"--sequence_length {wanted} is too long: the model takes at most {longest} tokens.")
    return int(wanted)


def _input_ids(config: Any, size: BatchSize) -> torch.Tensor:
    return torch.zeros(size.examples, _num_tokens(config, size), dtype=torch.long)


def _pixel_values(config: Any, size: BatchSize) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    side = _first(vision, "image_size", default=DEFAULT_IMAGE_SIZE)
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    return torch.zeros(size.examples, _first(vision, "num_channels", default=3), height, width)


def _input_features(config: Any, size: BatchSize) -> torch.Tensor:
    frames = 2 * _first(config, "max_source_positions", default=1500)
    return torch.zeros(size.examples, _first(config, "num_mel_bins", default=80), frames)


def _input_values(config: Any, size: BatchSize) -> torch.Tensor:
    return torch.zeros(size.examples, size.tokens or 16_000)  # one second of sound


INPUTS: dict[str, Callable[[Any, BatchSize], torch.Tensor]] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_values": _input_values,
}


def _labels(model: nn.Module, examples: int, tokens: int, input_shape: tuple[int, ...]) -> torch.Tensor:
    lengths = {"examples": examples, "tokens": tokens, "height": input_shape[-2], "width": input_shape[-1]}
    name = type(model).__name__
    dimensions = next((shape for end, shape in LABEL_SHAPES.items() if name.endswith(end)), "examples tokens")
    return torch.zeros([lengths[dimension] for dimension in dimensions.split()], dtype=torch.long)


def _loss_of_transformers(outputs: Any) -> torch.Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return _mean(outputs) if loss is None else loss


def _mean(outputs: Any) -> torch.Tensor:
    """The mean of the outputs, as the loss of a model that does not compute one."""
    if isinstance(outputs, Mapping):
        outputs = next(iter(outputs.values()))
    first = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first.float().mean()


def _first(config: Any, *names: str, default: Any) -> Any:
    """The first of several attributes that a configuration, or its configuration for text, has."""
    configs = [config, *(inner for name in ("text_config", "decoder") if (inner := getattr(config, name, None)))]
    for part in configs:
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


BATCHES: dict[str, Callable[[Any, BatchSize], Batch]] = {"transformers": transformers_batch, "timm": image_batch}
