"""Sequence parallelism of transformers' models: their own attention functions and masks, with full sequences.

A model calls the attention that its configuration names through transformers' registry (`ALL_ATTENTION_FUNCTIONS`), and makes
its masks with functions of `transformers.masking_utils`. Both are wrapped once for the process; the wrappers change
nothing for models that are not sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_data.sequence_shard import SequenceShard, shifted
from accel_integrations.parallel.transformers_plan import is_transformers_model
from accel_integrations.parallel.ulysses import SETTING, gather_heads, gathered, scatter_heads, uneven_heads
from accel_state.warning import warn_user

EAGER = "eager_attention_forward"
MASKS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
)
OF_TOKENS = ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states")
"""Arguments of these functions that are made from the tokens of a shard."""
WITH_MASKS = ("eager", "sdpa", "flex_attention")
"""Attention functions that tell packed samples apart by their mask."""
MARK = "_accelerate_sequence_group"
"""The attribute of the modules of a sharded model, for its `SequenceGroup`."""
INSTEAD = "Train it without sharding sequences (sp_size=1)"


@dataclass(eq=False)
class SequenceGroup:
    """The ranks that hold the shards of a model's sequences.

    Attributes:
        group: The process group; rank i holds shard i.
        num_calls: How often an attention function got full sequences.
        is_paused: Whether the sequences of the running forward pass are not sharded, as when text is generated.
    """

    group: Any
    num_calls: int = 0
    is_paused: bool = False

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self


@dataclass(frozen=True)
class FullSequences:
    """The full sequences that the ranks were called with shards of.

    Attributes:
        length: The sequence length.
        positions: int64 (batch, sequence).
        mask: bool (batch, sequence), or with four dimensions as the program made it; None for none.
    """

    length: int
    positions: torch.Tensor
    mask: torch.Tensor | None


FULL: ContextVar[FullSequences | None] = ContextVar("full_sequences", default=None)
"""Those of the running forward pass."""


# ---- preparing a model ----------------------------------------------------------------------------------------------


def check_model(model: Any, size: int, heads_per_rank: int) -> None:
    """Check that a model's sequences can be sharded around its own attention.

    Args:
        model: Of transformers.
        size: The number of ranks that share a sequence.
        heads_per_rank: Over how many ranks its heads are split in all.

    Raises:
        ValueError: They cannot; the message names the model and why.
    """
    name = type(model).__name__
    config = model.config
    problem = None
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in _modeling_files(model)):
        problem = "computes attention by itself, not through transformers' AttentionInterface"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "has an encoder and a decoder, whose sequences have different lengths"
    elif not any("position_ids" in _argument_names(part) for part in model.modules() if is_transformers_model(part)):
        problem = "takes no position_ids, so that every rank would count its tokens from 0"
    elif any(map(_counts_padding, model.modules())):
        problem = "derives positions from the padding of a sequence, of which a rank sees its shard alone"
    elif isinstance(heads, int) and heads % heads_per_rank:
        raise ValueError(uneven_heads(heads, heads_per_rank))
    if problem:
        raise ValueError(f"sp_size={size} shards sequences, but {name} {problem}. {INSTEAD}.")


def shard_sequences(model: Any, group: Any) -> SequenceGroup:
    """Have a model's attention functions get full sequences, and its forward pass shards of them.

    Args:
        model: Of transformers; changed in place.
        group: The process group; rank i holds shard i of the sequences.
    """
    shards = SequenceGroup(group)
    parts = [part for part in model.modules() if is_transformers_model(part)]
    for module in model.modules():
        setattr(module, MARK, shards)
    for file in _modeling_files(model):
        _wrap_functions(file)
    exchange = _Exchange(model, shards, parts)
    model.register_forward_pre_hook(exchange.before, with_kwargs=True)
    model.register_forward_hook(exchange.after, always_call=True)
    return shards


def _modeling_files(model: nn.Module) -> Iterator[Any]:
    """The Python modules that define the classes of a model's modules."""
    for name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        if name in sys.modules and not name.startswith("torch."):
            yield sys.modules[name]


def _counts_padding(module: nn.Module) -> bool:
    """Whether a module of position embeddings numbers the tokens that are not padding, as those of RoBERTa and of OPT do."""
    kind = type(module)
    numbers = "create_position_ids_from_input_ids"
    is_learned = "Position" in kind.__name__ and "attention_mask" in signature(kind.forward).parameters
    return is_learned or hasattr(kind, numbers) or hasattr(sys.modules.get(kind.__module__), numbers)


def _wrap_functions(file: Any) -> None:
    """Wrap the functions for masks, and the attention that is not in the registry, where a model looks them up."""
    wrappers: dict[str, Callable[[Any], Any]] = {
        EAGER: _with_full_sequences,
        **dict.fromkeys(MASKS, _of_full_sequences),
    }
    for name, wrap in wrappers.items():
        function = getattr(file, name, None)
        if callable(function) and not hasattr(function, MARK):
            setattr(file, name, wrap(function))


def _wrap_attention(parts: list[Any]) -> None:
    """Wrap the registered attention functions that the parts of a model name now."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in {part.config._attn_implementation for part in parts}:
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if function is not None and not hasattr(function, MARK):
            ALL_ATTENTION_FUNCTIONS[name] = _with_full_sequences(function, name)


def _argument_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(signature(type(model).forward).parameters)[1:]


# ---- a forward pass -------------------------------------------------------------------------------------------------


class _Exchange:
    """Gathers positions and masks of all ranks before a forward pass; all ranks raise the same error."""

    def __init__(self, model: Any, shards: SequenceGroup, parts: list[Any]) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        self.shards = shards
        self.parts = parts
        self.names = _argument_names(model)
        self.shifts_labels = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "") is ForCausalLMLoss
        self._shard = SequenceShard(dist.get_rank(shards.group), dist.get_world_size(shards.group))
        self._is_checked = False
        self._tokens: list[Any] = []

    @torch.compiler.disable
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange what the ranks were called with, and complete the arguments."""
        arguments: dict[str, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        inputs: Any = (
            arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
        )
        self._tokens.append(FULL.set(None))
        self.shards.is_paused = inputs is None or arguments.get("past_key_values") is not None
        if self.shards.is_paused:
            return None
        if not self._is_checked and arguments.get("num_items_in_batch") is not None:
            _warn_of_trainer(self._shard.count)
        _wrap_attention(self.parts)
        full = self._full_sequences(inputs, arguments)
        labels = self._labels(arguments, inputs.shape[1])
        mask = arguments.get("attention_mask")
        if mask is not None and mask.ndim == 2 and mask.shape[1] == full.length:
            arguments["attention_mask"] = self._shard.part_of(mask)
        FULL.set(full)
        return (), {**arguments, **labels}

    @torch.compiler.disable
    def after(self, model: Any, *_: Any) -> None:
        """Forget the sequences, and check once that an attention function was called."""
        was_sharded = FULL.get() is not None
        FULL.reset(self._tokens.pop())
        self.shards.is_paused = False
        if was_sharded and not self._is_checked and sys.exc_info()[0] is None:
            self._is_checked = True
            if self.shards.num_calls == 0:
                raise RuntimeError(
                    f"{SETTING}: the forward of {type(model).__name__} never called an attention function of transformers, so "
                    f"that its attention, if it has one, would see only this rank's shard of the sequence. {INSTEAD}."
                )

    def _full_sequences(self, inputs: torch.Tensor, arguments: dict[str, Any]) -> FullSequences:
        positions: Any
        mask: Any
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        batch, length = inputs.shape[:2]
        group, size = self.shards.group, self._shard.count
        kind = _kind_of(mask, length, size)
        fits = positions is not None and positions.ndim <= 2 and positions.shape[-1] == length
        facts = torch.tensor([batch, length, positions is None, fits, kind], device=inputs.device)
        fingerprint = _fingerprint(inputs, positions if fits else None, self._shard.index)
        rows = gathered(torch.cat([facts, fingerprint]), group)
        if not _fit(rows).all():
            raise ValueError(f"{SETTING}: {_problem_of(rows.tolist(), mask)}.")
        if kind == LOCAL_MASK:
            sent = torch.stack([positions.expand(batch, length).long(), mask.long()])
        else:
            sent = positions.expand(1, batch, length).long()
        of_full = gathered(sent, group).movedim(0, 2).flatten(2)
        full_mask = of_full[1].bool() if kind == LOCAL_MASK else mask
        return FullSequences(size * length, of_full[0], full_mask)

    def _labels(self, arguments: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
        """Labels of this rank's shard, as the model's loss takes them."""
        labels, shifted_labels = arguments.get("labels"), arguments.get("shift_labels")
        if shifted_labels is not None:
            if shifted_labels.shape[1] != length:
                shifted_labels = self._shard.part_of(shifted_labels)
            return {"labels": shifted_labels, "shift_labels": shifted_labels}
        if labels is None or labels.ndim < 2:
            return {}
        is_full = labels.shape[1] == length * self._shard.count
        if not self.shifts_labels:
            return {"labels": self._shard.part_of(labels) if is_full else labels}
        if not is_full:
            raise ValueError(
                f"{SETTING}: labels of shape {tuple(labels.shape)} are those of a shard, whose last token has its label in the "
                "next shard. Shift labels before they are sharded, and pass them as shift_labels."
            )
        part = self._shard.part_of(shifted(labels))
        return {"labels": part, "shift_labels": part}


def _warn_of_trainer(size: int) -> None:
    """Say how transformers' Trainer counts, which expects of a loader under sequence parallelism what DeepSpeed's does."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    names = getattr(
        getattr(trainer, "set_initial_training_values", None), "__code__", _warn_of_trainer.__code__
    ).co_names
    if "get_sp_size" in names and "sp_backend" not in names:
        warn_user(
            f"transformers' Trainer multiplies the number of batches of an epoch by sp_size={size}. If it runs this loop, max_steps "
            f"ends it after 1/{size} of the epochs unless they all are in the first one, and the learning rate changes over {size} "
            f"times the steps. Train by num_train_epochs with a constant learning rate, or write the loop yourself."
        )


NO_MASK, LOCAL_MASK, FULL_MASK, OTHER_MASK = range(4)


def _kind_of(mask: Any, length: int, size: int) -> int:
    """Which tokens a mask is for: those of the shard, or of full sequences."""
    if mask is None:
        return NO_MASK
    shape: tuple[int, ...] = tuple(getattr(mask, "shape", ()))
    if len(shape) == 2 and shape[1] == length:
        return LOCAL_MASK
    is_full = (len(shape) == 2 and shape[1] == size * length) or (len(shape) == 4 and shape[-1] == size * length)
    return FULL_MASK if is_full else OTHER_MASK


def _fingerprint(inputs: torch.Tensor, positions: torch.Tensor | None, index: int) -> torch.Tensor:
    """Two numbers that differ between ranks whose tokens or positions do, int64 (2,)."""
    if inputs.ndim > 2 or positions is None:  # embeddings are not compared
        return torch.tensor([index, index], device=inputs.device)
    weights = torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
    return torch.stack([(tensor.long() * weights).sum() for tensor in (inputs, positions)])


def _fit(rows: torch.Tensor) -> torch.Tensor:
    """Whether the ranks were called with shards of the same sequences: one read by the host, where nothing is wrong.

    Args:
        rows: For each rank batch size, local length, whether positions are missing, whether they fit, the kind of mask, and
            the fingerprint, int64 (ranks, 7).

    Returns:
        A bool tensor; all of it is true if they were.
    """
    differ = rows != rows[:1]
    are_same = ~differ[:, 5:].any()
    return torch.cat(
        [~differ[:, [0, 1, 4]].flatten(), rows[:, 2] == 0, rows[:, 3] == 1, rows[:, 4] != OTHER_MASK, ~are_same[None]]
    )


def _problem_of(rows: list[list[int]], mask: Any) -> str:
    """What is wrong, as a clause, where `_fit` found something."""
    shapes = [tuple(row[:2]) for row in rows]
    if len(set(shapes)) > 1:
        each = ", ".join(f"rank {rank} has {batch} x {length}" for rank, (batch, length) in enumerate(shapes))
        return f"the ranks were called with different numbers of tokens ({each}). Shard the batch on every rank, or on none"
    if any(row[2] for row in rows):
        return (
            "the model was called without position_ids, so that every rank would count its tokens from 0. Pass those of the "
            "full sequences, sharded as input_ids: 0, 1, 2, ... without packing"
        )
    if not all(row[3] for row in rows):
        return "position_ids must have the shape of input_ids, (batch, sequence)"
    if any(row[4] != rows[0][4] or row[4] == OTHER_MASK for row in rows):
        shape = getattr(mask, "shape", None)
        described = type(mask).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        return (
            f"attention_mask is a {described}. Every rank needs one of the shape of input_ids, or that of the full sequences: "
            "(batch, sequence), or (batch, 1 or heads, sequence, sequence)"
        )
    return (
        "every rank was called with the same tokens at the same positions, not with its shard of the sequences. Prepare the "
        "data loader, or shard the batch with accelerator.maybe_context_parallel"
    )


# ---- what a model calls ---------------------------------------------------------------------------------------------


def _of_full_sequences(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a mask, called with full sequences where a model's are sharded."""
    names = tuple(signature(make).parameters)

    @wraps(make)
    def create(*args: Any, **kwargs: Any) -> Any:
        full = FULL.get()
        if full is None:
            return make(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in OF_TOKENS:
            if arguments.get(name) is not None:
                raise ValueError(
                    f"{SETTING}: the model makes its attention mask from the tokens of a shard ({name}), as models that read "
                    f"images do. {INSTEAD}."
                )
        embeddings = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"  # transformers before 5.3
        local = arguments[embeddings]
        arguments[embeddings] = local.new_empty(()).expand(local.shape[0], full.length, local.shape[-1])
        arguments["attention_mask"] = full.mask
        if "position_ids" in arguments:
            arguments["position_ids"] = full.positions
        if arguments.get("cache_position") is not None:
            arguments["cache_position"] = torch.arange(full.length, device=local.device)
        return make(**arguments)

    setattr(create, MARK, True)
    return create


def _with_full_sequences(attention: Callable[..., Any], name: str = "eager") -> Callable[..., Any]:
    """An attention function that gets full sequences for some of the heads where a model's sequences are sharded."""
    # Flash attention tells packed samples apart by positions, which it does not name; other functions ignore them.
    names = frozenset(signature(attention).parameters) | (set() if name in WITH_MASKS else {"position_ids"})

    @wraps(attention)
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        shards: SequenceGroup | None = getattr(module, MARK, None)
        if shards is None or shards.is_paused:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        shards.num_calls += 1
        share = _Share(module, shards.group, query, key)
        full = scatter_heads(query, key, value, shards.group)
        output, *_ = attention(
            share.module_for(full), *full, share.of_mask(attention_mask), *args, **share.of_arguments(kwargs, names)
        )
        return gather_heads(output, shards.group, heads_dim=2), None

    setattr(attend, MARK, True)
    return attend


class _Share:
    """This rank's share of what an attention function gets one of for each head, or for each token."""

    def __init__(self, module: nn.Module, group: Any, query: torch.Tensor, key: torch.Tensor) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own_heads = query.shape[1] // size
        self._module = module
        self._group = group
        self._local_length = query.shape[2]
        self._length = size * query.shape[2]
        self._heads = query.shape[1]
        self._own = slice(rank * own_heads, (rank + 1) * own_heads)
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{SETTING}: {type(module).__name__} attends to {key.shape[2]} tokens from {query.shape[2]}, which are not "
                f"those of the sequence. {INSTEAD}."
            )

    def module_for(self, full: tuple[torch.Tensor, ...]) -> Any:
        """The module, or a view of it where it has something for each head."""
        groups = full[0].shape[1] // full[1].shape[1]
        differs = getattr(self._module, "num_key_value_groups", groups) != groups
        per_head = {
            name: parameter[self._own]
            for name, parameter in self._module._parameters.items()
            if parameter is not None and parameter.shape == (self._heads,)
        }
        if not differs and not per_head:
            return self._module
        return _ModuleView(self._module, {**per_head, "num_key_value_groups": groups})

    def of_mask(self, mask: Any) -> Any:
        """The mask of full sequences for the own heads.

        Raises:
            ValueError: It is for other tokens.
        """
        if mask is None:
            return None
        shape = tuple(mask.shape)
        if (
            shape[-1] != self._length
            or len(shape) not in (2, 4)
            or (len(shape) == 4 and shape[2] not in (1, self._length))
        ):
            raise ValueError(
                f"{SETTING}: {type(self._module).__name__} got an attention mask of shape {shape} for sequences of {self._length} "
                f"tokens: the model does not make it with a function of transformers.masking_utils. {INSTEAD}."
            )
        if len(shape) == 4 and shape[1] == self._heads > 1:
            return mask[:, self._own]
        return mask

    def of_arguments(self, arguments: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """The other arguments of the function: models pass on all that they were called with.

        Args:
            arguments: By name.
            names: Those that the function knows.

        Raises:
            ValueError: One is for the tokens of a shard, in a way that is not known here.
        """
        changed = dict(arguments)
        for name, argument in arguments.items():
            if not isinstance(argument, torch.Tensor):
                continue
            if name == "position_ids" and name in names:
                changed[name] = self._full_positions(argument)
            elif name not in names:
                continue
            elif argument.shape == (self._heads,):
                changed[name] = argument[self._own]
            elif self._local_length in argument.shape:
                raise ValueError(
                    f"{SETTING}: the attention of {type(self._module).__name__} takes {name} of shape {tuple(argument.shape)}, "
                    f"which is that of a shard. {INSTEAD}."
                )
        return changed

    def _full_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of full sequences, from which flash attention tells packed samples apart."""
        return gathered(positions.reshape(-1, positions.shape[-1]), self._group).movedim(0, 1).flatten(1)


class _ModuleView:
    """An attention module with other attributes, for a function that reads them."""

    def __init__(self, module: nn.Module, instead: dict[str, Any]) -> None:
        self.__dict__.update(instead, _viewed=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)
