"""`ModelShape`: what megatron-core has to know about a Hugging Face model, and the rows of which tables of weights consist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from accel_integrations.megatron.data.tasks import Causal, Task
from accel_integrations.megatron.families.chunk import Stage
from accel_integrations.megatron.groups import Degrees
from accel_integrations.megatron.weights.layouts import REPLICATED, Layout, Weight

if TYPE_CHECKING:
    from accel_state.settings.megatron import MegatronLMPlugin

Chunk = Callable[["ModelShape", Any, Stage, int], Any]
"""Makes a chunk of a model, for megatron-core's configuration, a stage, and a number of rows of the embeddings."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and kinds of layers of a model.

    Args:
        num_layers, hidden_size, heads, groups, head_size, mlp_size, num_tokens, max_length: Sizes; `groups` are the
            heads of keys and values, `num_tokens` is the vocabulary, `max_length` the longest sequence in tokens.
        tied: Whether input and output embeddings are one tensor.
        attention_dropout, hidden_dropout: Probabilities.
        window: How many tokens back attention reaches; None for all.
        activation: The function of the MLP.
        layers: Further arguments of `TransformerConfig`.
        model: Further arguments of `chunk`'s class.
        task: What the model reads and gives.
        num_experts: How many experts the MLPs of a mixture have; None for an ordinary model.
        takes_sequence_parallelism: Whether activations can be sharded along the sequence.
        takes_pipelines: Whether layers can be distributed over pipeline stages.
        weights: Makes the list of parameters for a number of rows of the embeddings.
        chunk: Makes a chunk of it.
    """

    num_layers: int
    hidden_size: int
    heads: int
    groups: int
    head_size: int
    mlp_size: int
    num_tokens: int
    max_length: int
    tied: bool
    attention_dropout: float
    hidden_dropout: float
    window: int | None
    activation: Callable[..., Any]
    weights: Callable[[ModelShape, int], list[Weight]]
    chunk: Chunk
    layers: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Causal)
    num_experts: int | None = None
    takes_sequence_parallelism: bool = True
    takes_pipelines: bool = True

    @property
    def learns_positions(self) -> bool:
        """Whether positions are embedded, so that batches may have their own."""
        return self.model.get("position_embedding_type") == "learned_absolute"

    def num_rows(self, degrees: Degrees) -> int:
        """Rows of the embeddings, which all tensor-parallel ranks share evenly."""
        return -(-self.num_tokens // degrees.tensor) * degrees.tensor

    def check(self, degrees: Degrees, plugin: MegatronLMPlugin) -> None:
        """Check that the model can be sharded and distributed like that.

        Args:
            degrees: The parallelism degrees.
            plugin: The other settings of the run.

        Raises:
            ValueError: It cannot; the message says what does not divide what.
        """
        for size, what in (
            (self.heads, "attention heads"),
            (self.groups, "heads of keys and values"),
            (self.mlp_size, "columns of the MLP"),
        ):
            if size % degrees.tensor:
                raise ValueError(
                    f"tp_degree={degrees.tensor} does not divide the model's {size} {what}. Choose a degree that does."
                )
        if plugin.sequence_parallelism and degrees.tensor > 1 and not self.takes_sequence_parallelism:
            raise ValueError(
                "sequence_parallelism cannot be combined with BERT, whose head has norms that megatron-core does not run "
                "so without Apex. Leave it out."
            )
        if degrees.context > 1 and not self.task.takes_shares:
            raise ValueError(
                f"context_parallel_size={degrees.context}, but only models that predict the next token have sequences that "
                "can be shared out. Set it to 1, and use tp_degree."
            )
        self._check_experts(degrees)
        if degrees.pipeline > 1:
            self._check_stages(degrees.pipeline, plugin)

    def _check_stages(self, stages: int, plugin: MegatronLMPlugin) -> None:
        if not self.takes_pipelines:
            raise ValueError(
                f"pp_degree={stages}, but megatron-core has no pipeline stages for an encoder with a decoder. Set it to 1, and "
                "use tp_degree."
            )
        last = plugin.decoder_last_pipeline_num_layers
        shared, sharing = (self.num_layers, stages) if last is None else (self.num_layers - last, stages - 1)
        if shared < 1 or shared % sharing:
            rest = "" if last is None else f" ({last} of them in the last stage)"
            raise ValueError(
                f"pp_degree={stages} does not divide the model's {self.num_layers} layers{rest}. Choose a degree that does, or "
                "set decoder_last_pipeline_num_layers."
            )
        virtual = plugin.num_layers_per_virtual_pipeline_stage
        if virtual is None:
            return
        if self.num_layers % (virtual * stages):
            raise ValueError(
                f"num_layers_per_virtual_pipeline_stage={virtual} with pp_degree={stages} does not divide the model's "
                f"{self.num_layers} layers. Choose a number that does."
            )
        if virtual * stages < self.num_layers and plugin.num_micro_batches % stages:
            raise ValueError(
                f"num_micro_batches={plugin.num_micro_batches} must be a multiple of pp_degree={stages} with "
                "num_layers_per_virtual_pipeline_stage."
            )

    def _check_experts(self, degrees: Degrees) -> None:
        if self.num_experts is None:
            for name, size in (
                ("expert_model_parallel_size", degrees.expert),
                ("expert_tensor_parallel_size", degrees.expert_tensor),
            ):
                if size > 1:
                    raise ValueError(f"{name}={size}, but the model has no experts. Set it to 1.")
            return
        if self.num_experts % degrees.expert:
            raise ValueError(
                f"expert_model_parallel_size={degrees.expert} does not divide the model's {self.num_experts} experts. Choose "
                "a size that does."
            )
        if (columns := self.layers["moe_ffn_hidden_size"]) % degrees.expert_tensor:
            raise ValueError(
                f"expert_tensor_parallel_size={degrees.expert_tensor} does not divide the {columns} columns of each expert's MLP. "
                "Choose a size that does."
            )


@dataclass(frozen=True)
class Row:
    """A module of megatron-core: its weight, and its bias where it has one.

    Args:
        name: The name of the module.
        sources: The modules of the Hugging Face model whose tensors it consists of, separated by blanks.
        weight, bias: The layouts of the two; None for no bias.
    """

    name: str
    sources: str
    weight: Layout = REPLICATED
    bias: Layout | None = None


def weights_of(rows: Iterable[Row], ours: str = "", theirs: str = "") -> Iterator[Weight]:
    """The parameters of some modules.

    Args:
        rows: The modules.
        ours: What stands before their names in megatron-core.
        theirs: The same in the Hugging Face model.
    """
    for row in rows:
        for kind, layout in (("weight", row.weight), ("bias", row.bias)):
            if layout is not None:
                sources = tuple(f"{theirs}{source}.{kind}" for source in row.sources.split())
                yield Weight(f"{ours}{row.name}.{kind}", sources, layout)


def sizes_of(config: Any) -> dict[str, Any]:
    """The sizes that configurations of transformers have under the same names, as arguments of `ModelShape`."""
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "groups": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_tokens": config.vocab_size,
        "tied": bool(config.tie_word_embeddings),
    }


ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


def activation(name: str) -> Callable[..., Any]:
    """An activation by its name in a configuration of transformers.

    Raises:
        ValueError: It is not in the table.
    """
    if name not in ACTIVATIONS:
        raise lacks(f"the activation {name!r}", f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def check_defaults(config: Any, **defaults: Any) -> None:
    """Check that what megatron-core has no other values for is as by default, where the configuration has it.

    Raises:
        ValueError: It is not.
    """
    for name, default in defaults.items():
        if (value := getattr(config, name, default)) != default:
            raise lacks(f"{name}={value}", f"{name}={default}")


def lacks(what: str, instead: str) -> ValueError:
    """The error for a configuration that megatron-core cannot compute."""
    return ValueError(f"The model's configuration has {what}, which is not mapped to Megatron-LM. Use {instead}.")
