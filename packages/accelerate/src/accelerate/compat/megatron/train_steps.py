"""Training steps of models of Megatron-LM: batches, forward pass, loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from accel_state.public_names import known_as
from accelerate.compat.megatron.groups import avg_losses_across_data_parallel_group
from accelerate.compat.megatron.stand_ins import function_that_needs_megatron

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


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

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        self.model_output_class = _output_class(args, "SequenceClassifierOutput")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A batch of BertTrainStep")

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
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A forward pass of BertTrainStep")


@known_as("accelerate.utils.megatron_lm.GPTTrainStep")
class GPTTrainStep(AbstractTrainStep):
    """Steps of GPT: next-token prediction.

    Args:
        accelerator: The accelerator.
        args: Megatron-LM's arguments.
    """

    eod_token: int
    pad_token: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.eod_token = args.padded_vocab_size - 1
        self.pad_token = self.eod_token
        self.reset_position_ids = args.reset_position_ids
        self.reset_attention_mask = args.reset_attention_mask
        self.eod_mask_loss = args.eod_mask_loss
        self.model_output_class = _output_class(args, "CausalLMOutputWithCrossAttentions")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A batch of GPTTrainStep")

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """A function of the mean loss over unmasked tokens.

        Args:
            accelerator: Not used.
        """
        return _language_loss

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A forward pass of GPTTrainStep")


@known_as("accelerate.utils.megatron_lm.T5TrainStep")
class T5TrainStep(AbstractTrainStep):
    """Steps of T5: span corruption.

    Args:
        accelerator: The accelerator.
        args: Megatron-LM's arguments.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
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
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A batch of T5TrainStep")

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """A function of the mean loss over unmasked tokens.

        Args:
            accelerator: Not used.
        """
        return _language_loss

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Needs Megatron-LM when it is called."""
        return function_that_needs_megatron("A forward pass of T5TrainStep")


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
