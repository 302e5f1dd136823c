"""Training steps of models of Megatron-LM: batches, forward pass, loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from accel_state.public_names import known_as
from accelerate.compat.megatron.functions import avg_losses_across_data_parallel_group

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
Batch = Mapping[str, torch.Tensor]
IGNORED = -100
"""The label of what does not count, as in transformers."""


@known_as("accelerate.utils.megatron_lm.AbstractTrainStep")
class AbstractTrainStep:
    """How batches are read, and the forward and the loss computed; `MegatronLMPlugin(custom_train_step_class=...)`.

    Args:
        name: The name of the kind of model.
    """

    name: str = ""
    get_batch: Callable[..., Any] | None = None
    loss_func: Callable[..., Any] | None = None
    forward_step: Callable[..., Any] | None = None
    model_output_class: type[Any] | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any] | None:
        """A function that takes the next micro-batch from an iterator."""
        return None

    def get_forward_step_func(self) -> Callable[..., Any] | None:
        """A function that takes an iterator and the model, and gives the output and a function of its loss."""
        return None

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any] | None:
        """A function that gives the loss, and losses to show by name."""
        return None


@known_as("accelerate.utils.megatron_lm.BertTrainStep")
class BertTrainStep(AbstractTrainStep):
    """Steps of BERT: masked language modeling, with or without sentence order prediction; or classification.

    Args:
        accelerator: The accelerator.
        args: Megatron-LM's arguments.
    """

    get_batch: Callable[..., Any]
    loss_func: Callable[..., Any]

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("BertTrainStep")
        accelerator, args = _in_order(accelerator, args)
        flag = args.pretraining_flag
        self.get_batch = _call(
            self.get_batch_func, accelerator=accelerator, megatron_dataset_flag=args.megatron_dataset_flag
        )
        self.loss_func = _call(
            self.get_loss_func, accelerator=accelerator, pretraining_flag=flag, num_labels=args.num_labels
        )
        self.forward_step = _call(
            self.get_forward_step_func, pretraining_flag=flag, bert_binary_head=args.bert_binary_head
        )
        self.model_output_class = _output_class(args, "SequenceClassifierOutput")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """A function that reads a micro-batch; None for what the batch does not have.

        It returns tokens, their types, whether sentences follow, which labels count, labels, and which tokens are real.

        Args:
            accelerator: Not used.
            megatron_dataset_flag: Not used: batches are those of transformers.
        """

        def get_batch(batches: Iterator[Batch]) -> tuple[torch.Tensor | None, ...]:
            batch = next(batches)
            tokens, labels = batch["input_ids"], batch.get("labels")
            counted = None if labels is None else (labels != IGNORED).float()
            mask = batch.get("attention_mask", torch.ones_like(tokens)).long()
            return tokens, batch.get("token_type_ids"), batch.get("next_sentence_label"), counted, labels, mask

        return get_batch

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Callable[..., Loss]:  # type: ignore[override]
        """A function of the loss: of masked tokens and sentence order, or of sequence labels.

        Args:
            accelerator: Not used.
            pretraining_flag: Whether it trains masked language modeling.
            num_labels: How many labels there are; one means regression.
        """

        def pretraining_loss(loss_mask: torch.Tensor, sentence_order: Any, outputs: Any) -> Loss:
            word_losses, order_logits = outputs
            loss = _masked_mean(word_losses, loss_mask)
            shown = {"lm loss": loss}
            if order_logits is not None:
                shown["sop loss"] = F.cross_entropy(order_logits.view(-1, 2).float(), sentence_order.view(-1))
                loss = loss + shown["sop loss"]
            return loss, _averaged(shown)

        def classification_loss(labels: torch.Tensor, logits: torch.Tensor) -> Loss:
            if num_labels == 1:
                loss = F.mse_loss(logits.view(-1), labels.view(-1))
            elif labels.dtype in (torch.long, torch.int):
                loss = F.cross_entropy(logits.view(-1, num_labels), labels.view(-1))
            else:
                loss = F.binary_cross_entropy_with_logits(logits, labels)
            return loss, _averaged({"loss": loss})

        return pretraining_loss if pretraining_flag else classification_loss

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Callable[..., Any]:  # type: ignore[override]
        """A function that runs a micro-batch through the model, and gives the output with a function of its loss.

        Args:
            pretraining_flag: Whether it trains masked language modeling.
            bert_binary_head: Not used: types of tokens are always embedded.
        """

        def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            tokens, types, sentence_order, counted, labels, mask = self.get_batch(batches)
            types = torch.zeros_like(tokens) if types is None else types
            if pretraining_flag:
                output = model(tokens, mask, tokentype_ids=types, lm_labels=labels.clamp(min=0))
                return output, partial(self.loss_func, counted, sentence_order)
            return model(tokens, mask, tokentype_ids=types), lambda output: self.loss_func(labels, output[1])

        return forward_step


@known_as("accelerate.utils.megatron_lm.GPTTrainStep")
class GPTTrainStep(AbstractTrainStep):
    """Steps of GPT: next-token prediction.

    Args:
        accelerator: The accelerator.
        args: Megatron-LM's arguments.
    """

    get_batch: Callable[..., Any]
    loss_func: Callable[..., Any]
    eod_token: int | None
    pad_token: int | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("GPTTrainStep")
        accelerator, args = _in_order(accelerator, args)
        self.get_batch = _call(
            self.get_batch_func, accelerator=accelerator, megatron_dataset_flag=args.megatron_dataset_flag
        )
        self.loss_func = _call(self.get_loss_func, accelerator=accelerator)
        self.forward_step = self.get_forward_step_func()
        self.eod_token = getattr(args, "eos_token_id", None)
        self.pad_token = self.eod_token
        self.reset_position_ids = args.reset_position_ids
        self.reset_attention_mask = args.reset_attention_mask
        self.eod_mask_loss = args.eod_mask_loss
        self.model_output_class = _output_class(args, "CausalLMOutputWithCrossAttentions")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """A function that reads a micro-batch: tokens, the next tokens, what counts, what does not see what, and positions.

        Tokens that end a text or pad it do not count; nor do labels of -100, and tokens before padding.

        Args:
            accelerator: Not used.
            megatron_dataset_flag: Whether batches have `text` with one token more, not `input_ids`.
        """

        def get_batch(batches: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
            batch = next(batches)
            if "tokens" in batch:  # of Megatron-LM's datasets
                tokens, following, counted = batch["tokens"], batch["labels"], batch["loss_mask"].bool()
            else:
                text = batch["text" if megatron_dataset_flag else "input_ids"].long()
                if not megatron_dataset_flag:
                    text = F.pad(text, (0, 1), value=self.eod_token or 0)
                tokens, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
                counted = torch.ones_like(tokens, dtype=torch.bool)
                for name, nothing in (("labels", IGNORED), ("attention_mask", 0)):
                    if name in batch:
                        counted[:, :-1] &= batch[name][:, 1:] != nothing
                if self.eod_token is None and not megatron_dataset_flag:
                    counted[:, -1] = False  # nothing is known to come after the last token
            if self.pad_token is not None:
                counted = counted & (tokens != self.pad_token)
            length = tokens.shape[1]
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
            return tokens, following, counted.float(), hidden, positions

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """A function of the mean loss over unmasked tokens.

        Args:
            accelerator: Not used.
        """
        return _language_loss

    def get_forward_step_func(self) -> Callable[..., Any]:
        """A function that runs a micro-batch through the model, and gives the output with a function of its loss."""

        def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            tokens, following, counted, hidden, positions = self.get_batch(batches)
            losses = model(tokens, positions, hidden, labels=following)
            return losses, partial(self.loss_func, counted)

        return forward_step


@known_as("accelerate.utils.megatron_lm.T5TrainStep")
class T5TrainStep(AbstractTrainStep):
    """Steps of T5: span corruption.

    Args:
        accelerator: The accelerator.
        args: Megatron-LM's arguments.
    """

    get_batch: Callable[..., Any]
    loss_func: Callable[..., Any]

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("T5TrainStep")
        accelerator, args = _in_order(accelerator, args)
        self.get_batch = _call(
            self.get_batch_func, accelerator=accelerator, megatron_dataset_flag=args.megatron_dataset_flag
        )
        self.loss_func = _call(self.get_loss_func, accelerator=accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = _output_class(args, "Seq2SeqLMOutput")

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """The mask of positions that do not attend to each other.

        Args:
            attention_mask: 1 for tokens, 0 for padding, of shape `(batch, length)`.

        Returns:
            True where a pair is masked, of shape `(batch, length, length)`.
        """
        seen = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)
        return seen < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """The causal mask of the decoder.

        Args:
            seq_length: How many positions there are.
            device: Where the mask is made.

        Returns:
            True where a pair is masked, of shape `(1, seq_length, seq_length)`.
        """
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str
    ) -> torch.Tensor:
        """The mask of encoder tokens for the decoder's cross-attention.

        Args:
            attention_mask: 1 for tokens of the encoder, 0 for padding, of shape `(batch, length)`.
            dec_seq_length: How many positions the decoder has.
            device: Where the mask is made.

        Returns:
            True where a pair is masked, of shape `(batch, dec_seq_length, length)`.
        """
        masked = attention_mask.to(device).unsqueeze(1) < 0.5
        return masked.expand(-1, dec_seq_length, -1).clone()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """A function that reads a micro-batch.

        It returns tokens of both sequences, which labels count, labels, and what does not see what: within the first sequence,
        within the second, and in the first from the second.

        Args:
            accelerator: Not used.
            megatron_dataset_flag: Not used: batches are those of transformers.
        """

        def get_batch(batches: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
            batch = next(batches)
            tokens, labels = batch["input_ids"], batch["labels"]
            mask = batch.get("attention_mask", torch.ones_like(tokens))
            before = F.pad(labels[:, :-1], (1, 0)).clamp(min=0)
            return (
                *(tokens, before, (labels != IGNORED).float(), labels.clamp(min=0), self.attn_mask_postprocess(mask)),
                self.get_decoder_mask(labels.shape[1], labels.device),
                self.get_enc_dec_mask(mask, labels.shape[1], labels.device),
            )

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """A function of the mean loss over unmasked tokens.

        Args:
            accelerator: Not used.
        """
        return _language_loss

    def get_forward_step_func(self) -> Callable[..., Any]:
        """A function that runs a micro-batch through the model, and gives the output with a function of its loss."""

        def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            tokens, before, counted, labels, *hidden = self.get_batch(batches)
            losses = model(tokens, before, *(one.unsqueeze(1) for one in hidden), lm_labels=labels)
            return losses, partial(self.loss_func, counted)

        return forward_step


def _in_order(accelerator: Any, args: Any) -> tuple[Any, Any]:
    """An accelerator and Megatron-LM's arguments, of which a program may have given the latter alone."""
    return (None, accelerator) if args is None else (accelerator, args)


def _call(make: Callable[..., Any], **arguments: Any) -> Any:
    """Call a method that a program may have replaced: by one that takes less, or the same by other names."""
    names = inspect.signature(make).parameters
    if all(name in arguments for name in names):
        return make(**{name: arguments[name] for name in names})
    return make(*arguments.values())


def _language_loss(loss_mask: torch.Tensor, outputs: Any) -> Loss:
    losses = outputs[0] if isinstance(outputs, tuple) else outputs
    loss = _masked_mean(losses, loss_mask)
    return loss, _averaged({"lm loss": loss})


def _masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean loss (0-dim) of the positions where the mask is 1."""
    weights = mask.float().view(-1)
    return (losses.float().view(-1) * weights).sum() / weights.sum()


def _averaged(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(losses, avg_losses_across_data_parallel_group(list(losses.values())), strict=True))


def _output_class(args: Any, name: str) -> Any:
    """The output class of transformers; None if Megatron-LM's arguments do not set `model_return_dict`."""
    if not args.model_return_dict:
        return None
    from transformers import modeling_outputs

    return getattr(modeling_outputs, name)
