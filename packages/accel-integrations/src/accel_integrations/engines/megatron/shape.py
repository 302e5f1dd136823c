"""`ModelShape`: what megatron-core has to know about a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_integrations.engines.megatron.chunks import Chunk, gpt_chunk
from accel_integrations.engines.megatron.layouts import Layout
from accel_integrations.engines.megatron.tasks import Causal, Task

if TYPE_CHECKING:
    from accel_integrations.engines.megatron.groups import Degrees


@dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core.

    Args:
        name: Its name, with the number of the layer in the full model.
        sources: The names of the tensors of the Hugging Face model that it consists of, or of rows of them.
        layout: How it consists of them.
    """

    name: str
    sources: tuple[str, ...]
    layout: Layout

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one expert of a mixture, which not all replicas have."""
        return ".local_experts." in self.name


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
        chunk: Makes a chunk of it.
        num_experts: How many experts the MLPs of a mixture have; None for an ordinary model.
        takes_sequence_parallelism: Whether activations can be sharded along the sequence.
        takes_pipelines: Whether layers can be distributed over pipeline stages.
        weights: Makes the list of parameters for a number of rows of the embeddings.
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
    layers: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Causal)
    chunk: Chunk = gpt_chunk
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

    def check(self, degrees: Degrees, layers_per_chunk: int | None, last_layers: int | None) -> None:
        """Check that the model can be shared out.

        Args:
            degrees: The parallelism degrees.
            layers_per_chunk: Layers of one virtual pipeline stage; None without these.
            last_layers: Layers of the last pipeline stage where it has another number than the others.

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
        self._check_experts(degrees)
        if degrees.pipeline > 1 and not self.takes_pipelines:
            raise ValueError(
                f"pp_degree={degrees.pipeline}, but megatron-core has no pipeline stages for an encoder with a decoder. Set "
                "it to 1, and use tp_degree."
            )
        if degrees.context > 1 and not self.task.takes_shares:
            raise ValueError(
                f"context_parallel_size={degrees.context}, but only models that predict the next token have sequences that "
                "can be shared out. Set it to 1, and use tp_degree."
            )
        shared, stages = self.num_layers, degrees.pipeline
        if last_layers is not None and degrees.pipeline > 1:
            shared, stages = self.num_layers - last_layers, degrees.pipeline - 1
        if shared < 1 or shared % stages:
            rest = "" if last_layers is None else f" ({last_layers} of them in the last stage)"
            raise ValueError(
                f"pp_degree={degrees.pipeline} does not divide the model's {self.num_layers} layers{rest}. Choose a degree "
                "that does, or set decoder_last_pipeline_num_layers."
            )
        if layers_per_chunk is not None and self.num_layers % (layers_per_chunk * degrees.pipeline):
            raise ValueError(
                f"num_layers_per_virtual_pipeline_stage={layers_per_chunk} with pp_degree={degrees.pipeline} does not "
                f"divide the model's {self.num_layers} layers. Choose a number that does."
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
