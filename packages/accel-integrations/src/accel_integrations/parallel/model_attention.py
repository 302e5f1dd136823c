"""Sequence parallelism of transformers' models: their own attention functions and masks, with full sequences.

A model calls the attention that its configuration names through transformers' registry (`ALL_ATTENTION_FUNCTIONS`), and makes
its masks with functions of `transformers.masking_utils`. Both are wrapped once for the process; the wrappers change
nothing for models that are not sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.full_sequences import FULL, INSTEAD, Exchange, SequenceGroup, argument_names
from accel_integrations.parallel.transformers_plan import is_transformers_model
from accel_integrations.parallel.ulysses import SETTING, gather_heads, gathered, scatter_heads, uneven_heads

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
    elif not any("position_ids" in argument_names(part) for part in model.modules() if is_transformers_model(part)):
        problem = "takes no position_ids, so that every rank would count its tokens from 0"
    elif any(map(_counts_padding, model.modules())):
        problem = "derives positions from the padding, and each rank sees that of its shard only"
    elif isinstance(heads, int) and heads % heads_per_rank:
        raise ValueError(uneven_heads(heads, heads_per_rank))
    if problem:
        raise ValueError(f"sp_size={size} shards sequences, but {name} {problem}. {INSTEAD}.")


def shard_sequences(model: Any, group: Any) -> None:
    """Have a model's attention functions get full sequences, and its forward pass shards of them.

    Args:
        model: Of transformers; changed in place.
        group: The process group; rank i holds shard i of the sequences.
    """
    parts = [part for part in model.modules() if is_transformers_model(part)]
    shards = SequenceGroup(group, partial(_wrap_attention, parts))
    for module in model.modules():
        setattr(module, MARK, shards)
    for file in _modeling_files(model):
        _wrap_functions(file)
    exchange = Exchange(model, shards)
    model.register_forward_pre_hook(exchange.before, with_kwargs=True)
    model.register_forward_hook(exchange.after, always_call=True)


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
