"""What kinds of models read from a batch, and which losses and logits they give.

Legend: B = samples of a micro-batch, S = sequence length in tokens, V = tokens of the vocabulary, R = tensor-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from accel_integrations.megatron.core import load

IGNORED = -100
"""The label of what counts for nothing."""
MicroBatch = Mapping[str, Tensor]
"""What a stage gets of one micro-batch: tensors by name, the first dimension of each is B."""


class Task(ABC):
    """A kind of model.

    Attributes:
        names: What a batch may have.
        labels: What it must have in training.
        per_sample: Which of `names` have one entry per sample, not per token.
        of_outputs: Which of `names` have one entry per token of a second sequence.
        has_token_labels: Whether `labels` has one entry per token.
        takes_shares: Whether context-parallel ranks can share out the tokens of a sequence.
        logits: The sizes of the logits by the names in the output; None for one row per token over the vocabulary, else
            the number of columns per sample.
    """

    names: frozenset[str]
    labels: tuple[str, ...] = ("labels",)
    per_sample: frozenset[str] = frozenset()
    of_outputs: frozenset[str] = frozenset()
    takes_shares: bool = False
    logits: Mapping[str, int | None] = {"logits": None}

    def length(self, values: Mapping[str, Tensor]) -> int:
        """The tokens per sample for which there are losses and logits."""
        return values["input_ids"].shape[1]

    def inputs_of_dataset(
        self, values: Mapping[str, Tensor], token_indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What stages need of a batch of Megatron-LM's datasets, where labels are the next tokens already.

        Args:
            values: "tokens" and "labels" (B, S); "loss_mask", "position_ids" and "attention_mask" (bool, (B, 1, S, S): True
                where a token does not see another) where given.
            token_indices: As for `stage_inputs`.

        Raises:
            ValueError: The model does not predict the next token.
        """
        raise ValueError(
            "The model got 'tokens', as of Megatron-LM's datasets for GPT, but does not predict the next token. Pass "
            f"{', '.join(sorted(self.names))}."
        )

    @abstractmethod
    def stage_inputs(self, values: Mapping[str, Tensor], token_indices: Tensor | None = None) -> dict[str, Tensor]:
        """What stages need of a batch.

        Args:
            values: The batch on its device, padded in samples and tokens, with "input_ids", "attention_mask" (bool),
                "position_ids" and "real" (bool, per sample: not padding); others where given.
            token_indices: The tokens that this rank computes, int64 (S / C,) for C context-parallel ranks; None for all.
        """

    @abstractmethod
    def call(self, model: Any, part: MicroBatch, *, with_losses: bool) -> Any:
        """The output of a stage: on the last one losses of tokens (B, S), or logits."""

    def num_targets(self, part: MicroBatch) -> list[Tensor]:
        """Over how many items each loss is averaged, int64 0-dim: the labels that count, unless there are several losses."""
        return [part["loss_mask"].sum()]

    @abstractmethod
    def losses(self, output: Any, part: MicroBatch) -> list[Tensor]:
        """The sums of the losses of the items, float32 0-dim, from an output with losses."""

    @abstractmethod
    def split_logits(self, output: Any) -> dict[str, Tensor]:
        """The logits in an output without losses, by name: (B, S, V / R), or (B, columns) of all ranks."""

    @abstractmethod
    def with_losses(self, output: Any, part: MicroBatch) -> Any:
        """An output with losses from one with logits."""

    def output(self, loss: Tensor | None, logits: Mapping[str, Tensor]) -> Any:
        """What the program gets."""
        from transformers import modeling_outputs

        return getattr(modeling_outputs, self.output_class)(loss=loss, **logits)

    output_class: str = "CausalLMOutput"


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token (B, S) from this rank's logits (B, S, V / R), which are left as they are."""
    logits_copy = logits.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the loss is computed in place
    losses: Tensor = load("tensor_parallel").vocab_parallel_cross_entropy(logits_copy, labels.t().contiguous())
    return losses.t()


def _summed(losses: Tensor, loss_mask: Tensor) -> Tensor:
    return (losses.float() * loss_mask).sum()


class NextTokens(Task):
    """A model that gives a loss, or logits, for each token."""

    @override
    def losses(self, output: Any, part: MicroBatch) -> list[Tensor]:
        """The sum over counted tokens."""
        return [_summed(output, part["loss_mask"])]

    @override
    def split_logits(self, output: Any) -> dict[str, Tensor]:
        """Those of the tokens."""
        return {"logits": output}

    @override
    def with_losses(self, output: Any, part: MicroBatch) -> Any:
        """The loss of each token."""
        return _token_losses(output, part["labels"])


def _targets(labels: Tensor) -> dict[str, Tensor]:
    """Labels for the loss, and which of them count (B, S)."""
    return {"labels": labels.clamp(min=0), "loss_mask": labels != IGNORED}


def _select_tokens(inputs: Mapping[str, Tensor], token_indices: Tensor | None) -> dict[str, Tensor]:
    """Some tokens of tensors (B, S)."""
    if token_indices is None:
        return dict(inputs)
    return {name: tensor[:, token_indices] for name, tensor in inputs.items()}


def _causal_mask(length: int, token_indices: Tensor | None, device: torch.device) -> Tensor:
    """Which tokens come after each of some, bool (S / C, S)."""
    all_tokens = torch.arange(length, device=device)
    return all_tokens > (all_tokens if token_indices is None else token_indices)[:, None]


class Causal(NextTokens):
    """A model that predicts the next token, as GPT does; labels are shifted here."""

    names = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
    takes_shares = True

    @override
    def stage_inputs(self, values: Mapping[str, Tensor], token_indices: Tensor | None = None) -> dict[str, Tensor]:
        """Tokens, positions, the attention mask (B, 1, S / C, S), the next tokens, and which of these count."""
        inputs = {"tokens": values["input_ids"], "positions": values["position_ids"]}
        if "labels" in values:
            inputs |= _targets(F.pad(values["labels"][:, 1:], (0, 1), value=IGNORED))
        mask = values["attention_mask"]
        hidden = _causal_mask(mask.shape[1], token_indices, mask.device) | ~mask[:, None, None, :]
        return _select_tokens(inputs, token_indices) | {"attention_mask": hidden}

    @override
    def inputs_of_dataset(
        self, values: Mapping[str, Tensor], token_indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The same, where labels need no shift."""
        tokens = values["tokens"]
        samples, length = tokens.shape
        if (hidden := values.get("attention_mask")) is None:
            hidden = _causal_mask(length, token_indices, tokens.device).expand(samples, 1, -1, -1)
        else:
            hidden = hidden.bool().expand(samples, 1, length, length)
            hidden = hidden if token_indices is None else hidden[:, :, token_indices]
        positions = values.get("position_ids", torch.arange(length, device=tokens.device))
        inputs = {"tokens": tokens, "positions": positions.expand_as(tokens), **_targets(values["labels"])}
        if "loss_mask" in values:
            inputs["loss_mask"] = inputs["loss_mask"] & values["loss_mask"].bool()
        return _select_tokens(inputs, token_indices) | {"attention_mask": hidden}

    @override
    def call(self, model: Any, part: MicroBatch, *, with_losses: bool) -> Any:
        """Run the stage."""
        labels = part["labels"] if with_losses else None
        return model(part["tokens"], part["positions"], part["attention_mask"], labels=labels)


class SequenceToSequence(NextTokens):
    """A model that reads one sequence and predicts another, as T5 does.

    Args:
        first_token: With which the decoder begins; None where batches have what it reads.
        padding: The token that stands for labels of -100 where the decoder reads them; None as above.
    """

    names = frozenset({"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels"})
    of_outputs = frozenset({"decoder_input_ids", "decoder_attention_mask", "labels"})
    output_class = "Seq2SeqLMOutput"

    def __init__(self, first_token: int | None, padding: int | None) -> None:
        self._first_token = first_token
        self._padding = padding

    @override
    def length(self, values: Mapping[str, Tensor]) -> int:
        """Tokens of the second sequence.

        Raises:
            ValueError: There is none.
        """
        for name in ("labels", "decoder_input_ids"):
            if name in values:
                return values[name].shape[1]
        raise ValueError("The model was called without 'labels' and without 'decoder_input_ids'. Pass one of them.")

    @override
    def stage_inputs(self, values: Mapping[str, Tensor], token_indices: Tensor | None = None) -> dict[str, Tensor]:
        """Encoder and decoder tokens, self- and cross-attention masks, labels.

        The masks have the shapes (B, 1, 1, S), (B, 1, T, T) and (B, 1, 1, S), for T tokens of the decoder.
        """
        tokens, length = values["input_ids"], self.length(values)
        hidden = _causal_mask(length, None, tokens.device).expand(len(tokens), 1, -1, -1)
        if "decoder_attention_mask" in values:
            hidden = hidden | ~values["decoder_attention_mask"].bool()[:, None, None, :]
        padding = ~values["attention_mask"][:, None, None, :]
        inputs = {
            "tokens": tokens, "padding": padding, "attention_mask": hidden, "decoder_tokens": self._decoder_tokens(values)
        }  # fmt: skip
        return inputs | _targets(values["labels"]) if "labels" in values else inputs

    def _decoder_tokens(self, values: Mapping[str, Tensor]) -> Tensor:
        """What the decoder reads: as given, or the labels before each.

        Raises:
            ValueError: It is not given, and the model's configuration does not say with which token it begins.
        """
        if "decoder_input_ids" in values:
            return values["decoder_input_ids"]
        if self._first_token is None or self._padding is None:
            name = "decoder_start_token_id" if self._first_token is None else "pad_token_id"
            raise ValueError(
                f"The model's configuration has {name}=None, so that the decoder's tokens cannot be made of labels. Set it, or "
                "pass decoder_input_ids."
            )
        before = F.pad(values["labels"][:, :-1], (1, 0), value=self._first_token)
        return before.masked_fill(before == IGNORED, self._padding)

    @override
    def call(self, model: Any, part: MicroBatch, *, with_losses: bool) -> Any:
        """Run the model."""
        labels = part["labels"] if with_losses else None
        padding = part["padding"]
        return model(
            part["tokens"], part["decoder_tokens"], padding, part["attention_mask"], padding, lm_labels=labels
        )


class Masked(Task):
    """BERT that predicts masked tokens, perhaps with the prediction whether a sentence follows another.

    Args:
        has_sentences: Whether it predicts that.
    """

    output_class = "MaskedLMOutput"

    def __init__(self, *, has_sentences: bool) -> None:
        self.names = frozenset({"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"})
        self._has_sentences = has_sentences
        if has_sentences:
            self.names |= {"next_sentence_label"}
            self.labels = ("labels", "next_sentence_label")
            self.per_sample = frozenset({"next_sentence_label"})
            self.logits = {"prediction_logits": None, "seq_relationship_logits": 2}

    @override
    def stage_inputs(self, values: Mapping[str, Tensor], token_indices: Tensor | None = None) -> dict[str, Tensor]:
        """Tokens, their types, which are padding, and labels."""
        inputs = _encoder_inputs(values)
        if "labels" in values:
            inputs |= _targets(values["labels"])
        if self._has_sentences and "next_sentence_label" in values:
            inputs["follows"] = values["next_sentence_label"].view(-1)
        return inputs

    @override
    def call(self, model: Any, part: MicroBatch, *, with_losses: bool) -> Any:
        """Run the stage; on the last one, a pair: losses or logits of tokens, and logits (B, 2) or None."""
        labels = part["labels"] if with_losses else None
        return model(part["tokens"], part["mask"], part["types"], lm_labels=labels)

    @override
    def num_targets(self, part: MicroBatch) -> list[Tensor]:
        """The number of masked tokens, and of samples."""
        counts = super().num_targets(part)
        return [*counts, (part["follows"] != IGNORED).sum()] if self._has_sentences else counts

    @override
    def losses(self, output: Any, part: MicroBatch) -> list[Tensor]:
        """The sums over masked tokens and over samples."""
        tokens, follows = output
        losses = [_summed(tokens, part["loss_mask"])]
        if self._has_sentences:
            losses.append(F.cross_entropy(follows.float(), part["follows"], ignore_index=IGNORED, reduction="sum"))
        return losses

    @override
    def split_logits(self, output: Any) -> dict[str, Tensor]:
        """Those of the tokens, and of the samples."""
        return {name: one for name, one in zip(self.logits, output, strict=False) if one is not None}

    @override
    def with_losses(self, output: Any, part: MicroBatch) -> Any:
        """The loss of each token, and the logits of the samples."""
        return _token_losses(output[0], part["labels"]), output[1]

    @override
    def output(self, loss: Tensor | None, logits: Mapping[str, Tensor]) -> Any:
        """The output of the model's class."""
        if not self._has_sentences:
            return super().output(loss, logits)
        from transformers.models.bert import modeling_bert

        return modeling_bert.BertForPreTrainingOutput(loss=loss, **dict[str, Any](logits))


SampleLoss = Callable[[Tensor, Tensor], Tensor]
SAMPLE_LOSSES: Mapping[str, SampleLoss] = {
    "regression": lambda logits, labels: F.mse_loss(logits, labels.float().view_as(logits), reduction="none"),
    "single_label_classification": lambda logits, labels: F.cross_entropy(
        logits, labels.view(-1), ignore_index=IGNORED, reduction="none"
    ),
    "multi_label_classification": lambda logits, labels: F.binary_cross_entropy_with_logits(
        logits, labels.float(), reduction="none"
    ),
}
"""The losses of samples by `config.problem_type`: from logits (B, columns) and labels, of the labels' shape."""


@dataclass(frozen=True)
class Classified(Task):
    """A model that classifies sequences, or gives numbers for them.

    Args:
        config: That of the model: `num_labels`, and perhaps `problem_type`.
    """

    config: Any
    names = frozenset({"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"})
    per_sample = frozenset({"labels"})
    output_class = "SequenceClassifierOutput"

    @property
    def logits(self) -> Mapping[str, int | None]:  # type: ignore[override]
        """One row per sample."""
        return {"logits": self.config.num_labels}

    @override
    def stage_inputs(self, values: Mapping[str, Tensor], token_indices: Tensor | None = None) -> dict[str, Tensor]:
        """Tokens, their types, which are padding, labels, and which samples count."""
        inputs = _encoder_inputs(values)
        if "labels" in values:
            labels, loss_mask = values["labels"], values["real"]
            if not labels.is_floating_point():
                loss_mask = loss_mask & (labels.view(len(labels), -1)[:, 0] != IGNORED)
            inputs |= {"labels": labels, "loss_mask": loss_mask}
        return inputs

    @override
    def call(self, model: Any, part: MicroBatch, *, with_losses: bool) -> Any:
        """Run the stage; on the last one, logits (B, columns) come second."""
        return model(part["tokens"], part["mask"], part["types"])

    @override
    def num_targets(self, part: MicroBatch) -> list[Tensor]:
        """The number of labels."""
        return [part["loss_mask"].sum() * self._labels_per_sample(part["labels"])]

    @override
    def losses(self, output: Any, part: MicroBatch) -> list[Tensor]:
        """The sum over samples, of a loss that depends on the labels as in transformers."""
        logits, labels = output[1].float(), part["labels"]
        losses = SAMPLE_LOSSES[self._kind(labels)](logits, labels)
        return [_summed(losses.view(len(labels), -1).sum(1), part["loss_mask"])]

    def _kind(self, labels: Tensor) -> str:
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def _labels_per_sample(self, labels: Tensor) -> int:
        return 1 if self._kind(labels) == "single_label_classification" else int(self.config.num_labels)

    @override
    def split_logits(self, output: Any) -> dict[str, Tensor]:
        """Those of the samples."""
        return {"logits": output[1]}

    @override
    def with_losses(self, output: Any, part: MicroBatch) -> Any:
        """The output itself, which has logits in either case."""
        return output


def _encoder_inputs(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tokens = values["input_ids"]
    types = values.get("token_type_ids", torch.zeros_like(tokens))
    return {"tokens": tokens, "types": types, "mask": values["attention_mask"].long()}
