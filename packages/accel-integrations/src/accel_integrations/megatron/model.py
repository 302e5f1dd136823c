"""`MegatronEngine`: the prepared model, whose call is a whole training step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.megatron.checkpoints import load_weights, save_weights
from accel_integrations.megatron.chunks import Chunks
from accel_integrations.megatron.core import load, on_device
from accel_integrations.megatron.data.batches import Batch, Limits, make_batch
from accel_integrations.megatron.data.tasks import Causal
from accel_integrations.megatron.generation import GenerationOptions, Prompts, generate
from accel_integrations.megatron.schedule import Outcome, Schedule
from accel_integrations.megatron.weights.optimizer import ShardedOptimizer
from accel_integrations.megatron.weights.sharded import ShardedWeights
from accel_state.public_names import known_as
from accel_state.warning import warn_user

WRITE_INSTEAD = "Or write it with accelerator.save_model(), and load it in one process."


@dataclass
class Parts:
    """What `prepare` made of a model.

    Args:
        original: The Hugging Face model, without values.
        chunks: This rank's part of it.
        weights: Its weights over all ranks.
        schedule: Runs batches.
        limits: What batches may be like.
        device: Where it is trained.
        max_norm: At which gradients are clipped; 0 for not at all.
        return_logits: Whether outputs have logits in evaluation, where batches have labels.
        after_step: Called after each step of the optimizer.
        handler: The object of `custom_train_step_class`, if any.
    """

    original: nn.Module
    chunks: Chunks
    weights: ShardedWeights
    schedule: Schedule
    limits: Limits
    device: torch.device
    max_norm: float
    return_logits: bool
    after_step: Callable[[], None]
    handler: Any = None

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor, mask: torch.Tensor | None, options: GenerationOptions) -> torch.Tensor:
        """Continue prompts, int64 (prompts, tokens); see `MegatronEngine.megatron_generate`."""
        limits, parallel = replace(self.limits, is_raw=False), load("parallel_state")
        if not isinstance(limits.task, Causal):
            raise NotImplementedError(
                f"generate() is for models that predict the next token, and {type(self.original).__name__} does not under "
                f"Megatron-LM. {WRITE_INSTEAD}"
            )
        if parallel.get_expert_model_parallel_world_size() > 1 and parallel.get_data_parallel_world_size() > 1:
            raise NotImplementedError(
                "generate() of a model whose experts are spread over replicas would need all of these to generate equally "
                f"many tokens. Set expert_model_parallel_size=1. {WRITE_INSTEAD}"
            )
        prompts = Prompts.of(inputs, mask, options.bos_token_id if options.add_BOS else None)
        num_new = options.num_new(prompts.columns)
        longest = min(limits.max_length, limits.window or limits.max_length)
        if prompts.longest + num_new > longest:
            raise ValueError(
                f"{prompts.longest} tokens of the longest prompt and {num_new} new ones are more than the {longest} that the "
                "model takes. Shorten the prompts, or set max_new_tokens lower."
            )
        schedule, device = self.schedule.without_hooks(), self.device
        prompts = replace(prompts, rows=[row.to(device) for row in prompts.rows])

        def next_logits(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            batch = make_batch({"input_ids": tokens}, limits, device, training=False)
            logits = schedule.evaluate(batch, with_logits=True).logits["logits"]
            return logits[torch.arange(len(tokens), device=device), lengths - 1].float()

        with on_device(device):
            return generate(next_logits, prompts, options, self._seed(options))

    def _seed(self, options: GenerationOptions) -> int:
        """The seed of drawn tokens, the same on all ranks."""
        if options.random_seed is not None or not options.samples:
            return options.random_seed or 0
        seed = torch.randint(2**31, (1,)).to(self.device)
        dist.broadcast(seed, 0)
        return int(seed)


@known_as("accelerate.utils.megatron_lm.MegatronEngine")
class MegatronEngine(nn.Module):
    """A model that Megatron-LM trains: in training its call takes a whole step, in evaluation it computes the loss.

    Args:
        accelerator: Not used.
        model: What the engine made of the model.
        optimizer: The optimizer that takes the steps; None for evaluation only.
        scheduler: The scheduler of the optimizer, if any.

    Attributes:
        module: The model that was prepared, without values: its configuration and structure.
        base_model: The first chunk of this rank.
        optimizer, scheduler: As given.
        train_step_handler: The object of `custom_train_step_class`, if any.
        module_config: megatron-core's configuration of the model.
        iteration: How many steps were taken.
        grad_norm: The norm of all gradients at the last step, before clipping (0-dim float32).
        total_loss_dict, eval_total_loss_dict: Sums of losses in training and in evaluation since `log_eval_results`.
    """

    module: Any
    base_model: Any
    optimizer: Any
    scheduler: Any
    train_step_handler: Any
    module_config: Any
    iteration: int
    num_floating_point_operations_so_far: int
    report_memory_flag: bool
    total_loss_dict: dict[str, Any]
    eval_total_loss_dict: dict[str, Any]
    grad_norm: torch.Tensor | None

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        if not isinstance(model, Parts):
            raise TypeError("MegatronEngine is made by Accelerator.prepare(). Pass the model to that.")
        self.__dict__["module"] = model.original  # no submodule: it has no values
        self.chunks = nn.ModuleList(model.chunks.modules)
        self.base_model = model.chunks.modules[0]
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.module_config = model.chunks.config
        self.train_step_handler = model.handler
        self.iteration = 0
        self.num_floating_point_operations_so_far = 0
        self.report_memory_flag = True
        self.total_loss_dict = {}
        self.eval_total_loss_dict = {}
        self.grad_norm = None
        self.parts = model
        self.sharded: ShardedOptimizer | None = None

    @property
    def config(self) -> Any:
        """The configuration of the model that was prepared."""
        return self.parts.original.config

    def get_module_config(self) -> dict[str, Any]:
        """megatron-core's configuration of the model, by name."""
        return dict(vars(self.module_config))

    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """An iterator over the micro-batches of a batch: dicts of tensors."""
        size = self.parts.limits.num_micro_batches
        cut = {name: value.chunk(size) for name, value in batch_data.items()}
        return iter([{name: parts[number] for name, parts in cut.items()} for number in range(size)])

    def forward(self, **batch_data: Any) -> Any:
        """Take a step, or compute the loss and the logits in evaluation.

        Args:
            batch_data: What the model of transformers takes: `input_ids`, `labels` and `attention_mask`, int64 (samples,
                tokens), and so on. Labels of -100 count for nothing. All ranks of a replica pass the same.

        Returns:
            An object with `loss`, 0-dim float32: the mean over all tokens of all replicas, the same on every rank.

        Raises:
            ValueError: The batch cannot be used.
        """
        return self.train_step(**batch_data) if self.training else self.eval_step(**batch_data)

    def train_step(self, **batch_data: Any) -> Any:
        """Forward and backward passes of all micro-batches, and a step of the optimizer and the scheduler."""
        if self.sharded is None:
            raise RuntimeError(
                "The model was called in training, but prepared without an optimizer. Pass both to one call of prepare(), or "
                "call model.eval() first."
            )
        batch = self._batch(batch_data)
        self.sharded.loss_scale.expect(math.prod(batch.shape))
        with on_device(self.parts.device):
            outcome = self.parts.schedule.train(batch)
            self.grad_norm = self.sharded.step(self.parts.max_norm)
        self.optimizer.note_step(self.sharded.skipped)
        self.iteration += 1
        _add(self.total_loss_dict, outcome.loss)
        self.parts.after_step()
        return self._output(outcome)

    def eval_step(self, **batch_data: Any) -> Any:
        """Forward passes of all micro-batches."""
        batch = self._batch(batch_data)
        with_logits = self.parts.return_logits or not batch.has_labels
        with on_device(self.parts.device):
            outcome = self.parts.schedule.evaluate(batch, with_logits)
        _add(self.eval_total_loss_dict, outcome.loss)
        return self._output(outcome)

    def log_eval_results(self) -> None:
        """Forget the sums of losses of an evaluation; trackers log what a program gives to `accelerator.log`."""
        self.eval_total_loss_dict.clear()

    def save_checkpoint(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the weights for Megatron-LM, in its format `torch_dist`; all ranks call this.

        Args:
            output_dir: The folder of the run; the checkpoint is `iter_*` in it, with the number of steps that were taken.

        Raises:
            OSError: It could not be written.
        """
        save_weights(output_dir, self.iteration, self.parts.weights, self.parts.chunks, self.parts.device)

    def load_checkpoint(self, input_dir: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint of Megatron-LM (`torch` or `torch_dist`) of any degrees; all ranks call this.

        Args:
            input_dir: The folder of the run, of which the latest iteration is read, or that of an iteration (`iter_*`).

        Raises:
            FileNotFoundError: There is no such checkpoint.
            ValueError: It is damaged, or of a model of other parameters or sizes.
        """
        self.iteration = load_weights(input_dir, self.parts.weights)
        if self.optimizer is not None and dist.get_rank() == dist.get_world_size() - 1:
            warn_user(
                f"load_checkpoint() has loaded the weights of iteration {self.iteration}; the optimizer starts anew. To continue a "
                "run with its optimizer, use accelerator.save_state() and load_state()."
            )

    def megatron_generate(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Continue prompts: greedily, with drawn tokens, or by beam search. All ranks of a replica pass the same prompts.

        Args:
            inputs: The prompts, int64 (prompts, tokens), padded on either side.
            attention_mask: 0 where they are padded, as `inputs`; None for no padding.
            max_length: Columns of the result, prompts included.
            max_new_tokens: New tokens after each prompt, instead; 20 by default.
            num_beams: How many sequences beam search follows.
            temperature: By which logits are divided; tokens are drawn, where this or one of the next two is set.
            top_k: Draw from this many most probable tokens.
            top_p: Draw from the most probable tokens that have this probability together.
            length_penalty: Exponent of the number of new tokens that scores of beams are divided by.
            **kwargs: Other fields of `GenerationOptions`, such as `add_BOS`, `top_p_decay`, `eos_token_id`, `random_seed`.

        Returns:
            The prompts, each with its continuation, int64 (prompts, tokens + new tokens), the same on all ranks of a replica.

        Raises:
            NotImplementedError: The model does not predict the next token, or its experts are spread over replicas.
            TypeError, ValueError: For options and prompts that cannot be used.
        """
        chosen = {
            "max_length": max_length,
            "max_new_tokens": max_new_tokens,
            "num_beams": num_beams,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "length_penalty": length_penalty,
        }
        original = self.parts.original
        options = GenerationOptions.of(
            chosen | kwargs, getattr(original, "generation_config", None) or original.config
        )
        was_training = self.training
        self.eval()
        try:
            return self.parts.generate(inputs, attention_mask, options)
        finally:
            self.train(was_training)

    def generate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Continue prompts, with the arguments of `megatron_generate`; prompts may be named `input_ids`, as in transformers."""
        prompts = kwargs.pop("input_ids", None) if inputs is None else inputs
        if prompts is None:
            raise ValueError("generate() got no prompts. Pass input_ids, int64 of shape (prompts, tokens).")
        return self.megatron_generate(prompts, **kwargs)

    def _batch(self, values: Any) -> Batch:
        return make_batch(values, self.parts.limits, self.parts.device, training=self.training)

    def _output(self, outcome: Outcome) -> Any:
        handler = self.train_step_handler
        if (output_class := getattr(handler, "model_output_class", None)) is not None:
            return output_class(loss=outcome.loss)
        return self.parts.limits.task.output(outcome.loss, outcome.logits)


def _add(sums: dict[str, Any], loss: torch.Tensor | None) -> None:
    if loss is not None:
        sums["lm loss"] = sums.get("lm loss", 0.0) + loss
        sums["steps"] = sums.get("steps", 0) + 1
