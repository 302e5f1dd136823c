"""Megatron-LM: parallelism degrees, activation recomputation, and the arguments that Megatron-LM is initialized with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from typing_extensions import override

from accel_state.enums import DistributedType
from accel_state.errors import missing_library
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.megatron_models import find_parser
from accel_state.settings.option import (
    BOOLEAN,
    FUNCTION,
    MAPPING,
    NUMBER,
    TEXT,
    Kind,
    at_least,
    is_integer,
    is_number,
    one_of,
    option,
    resolve_options,
    suggested,
)
from accel_state.settings.plugin import VENDOR_KINDS, Plugin, RunSoFar
from accel_state.warning import warn_user

NOT_NEGATIVE = Kind(
    "a number of at least 0", float, lambda value: is_number(value) and value >= 0, metavar="X", limits=(0, None)
)
PROBABILITY = Kind(
    "a probability from 0 to 1", float, lambda value: is_number(value) and 0 <= value <= 1, metavar="X", limits=(0, 1)
)
COUNT, SIZE = at_least(0), at_least(1)
SAMPLE_COUNTS = Kind(
    "up to three integers: samples seen in training, validation and test",
    str,
    lambda value: isinstance(value, list) and len(value) <= 3 and all(is_integer(count) for count in value),
)

RENAMED_ARGUMENTS = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
}
SAME_ARGUMENTS = (
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "DDP_impl",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)
"""Fields that Megatron-LM knows by the same name."""
SCHEDULE_ARGUMENTS = (
    "train_iters",
    "lr_warmup_iters",
    "train_samples",
    "lr_warmup_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "lr_decay_style",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
)


def _launched(name: str, kind: Kind, fallback: Any, help: str, **more: Any) -> Any:
    """An option that the launcher passes in an environment variable named after the field."""
    return option(
        None,
        kind=kind,
        env=f"MEGATRON_LM_{name.upper()}",
        flag=f"--megatron_lm_{name}",
        help=help,
        fallback=fallback,
        **more,
    )


def _if_given(name: str, kind: Kind, fallback: Any, help: str) -> Any:
    """An option that the launcher passes only when it was given, and a bool as the str that was given."""
    kind = kind._replace(canonical=str) if kind.closed else kind
    return _launched(name, kind, fallback, help, launch_default=None, as_text=kind.closed)


@known_as("accelerate.utils.dataclasses.MegatronLMPlugin")
@guess_arguments
@dataclass
class MegatronLMPlugin(Plugin):
    """How Megatron-LM trains. Fields are passed on to it under its own names; those left None may come from the environment.

    Args:
        tp_degree, pp_degree (`int`): Tensor-parallel ranks over which every layer is sharded; pipeline stages.
        use_custom_fsdp (`bool`): Shard with Megatron's own FSDP.
        overlap_cpu_optimizer_d2h_h2d, optimizer_cpu_offload, use_precision_aware_optimizer (`bool`): Offload
            of optimizer states, and their precision.
        no_load_optim, no_save_optim (`bool`): Do not load or save optimizer states in checkpoints.
        eod_mask_loss (`bool`): Mask the loss of end-of-document tokens.
        decoder_last_pipeline_num_layers (`int`, *optional*): Layers of the last pipeline stage, when it has another
            number than the other stages.
        recompute_granularity, recompute_method, recompute_num_layers, recompute_activations: Activation
            recomputation in the backward pass.
        attention_backend (`bool`), attention_dropout, hidden_dropout (`float`), attention_softmax_in_fp32 (`bool`):
            Attention and dropout.
        expert_model_parallel_size, expert_tensor_parallel_size, context_parallel_size (`int`): Expert parallel size,
            tensor parallel size of experts, and context parallel size.
        calculate_per_token_loss, use_rotary_position_embeddings (`bool`): Average the loss over tokens rather than over
            micro-batches; use rotary position embeddings.
        num_micro_batches (`int`): Micro-batches per optimizer step and process.
        gradient_clipping (`float`): Maximum gradient norm for gradient clipping, 0 for none.
        sequence_parallelism (`bool`): Shard the activations outside tensor-parallel layers along the sequence.
        use_distributed_optimizer (`bool`): Shard optimizer states over the data-parallel ranks.
        pipeline_model_parallel_split_rank, num_layers_per_virtual_pipeline_stage (`int`, *optional*): Layout of the
            pipeline.
        is_train_batch_min (`bool`): With several loaders, take the smallest batch size rather than the largest.
        train_iters, train_samples, lr_decay_iters, lr_decay_samples (`int`, *optional*): Length of the run and of the decay, in
            steps or samples; taken from the scheduler where left out.
        lr_warmup_iters, lr_warmup_samples (`int`), lr_warmup_fraction (`float`, *optional*): Length of the warmup, in steps, in
            samples, or as a part of the decay.
        lr_decay_style (`str`), min_lr (`float`): `"linear"`, `"cosine"`, `"constant"` or `"inverse-square-root"`, down to a
            learning rate.
        weight_decay_incr_style (`str`), start_weight_decay, end_weight_decay (`float`, *optional*): Weight decay that grows.
        consumed_samples (list of `int`, *optional*): Samples seen in training, validation and test.
        no_wd_decay_cond, scale_lr_cond (function, *optional*), lr_mult (`float`): Which parameters have no weight decay,
            and which have another learning rate.
        megatron_dataset_flag (`bool`): Whether data are in Megatron's format.
        seq_length, encoder_seq_length, decoder_seq_length (`int`, *optional*): Sequence lengths in tokens; found from
            model and batch where left out.
        tensorboard_dir (`str`, *optional*), set_all_logging_options (`bool`): Megatron's own logging.
        eval_iters, eval_interval (`int`): Batches per evaluation, and steps between evaluations.
        return_logits (`bool`): Whether the forward pass returns logits.
        custom_train_step_class, custom_train_step_kwargs: A class, and its arguments, whose `forward_step` reads micro-batches
            and computes everything.
        custom_model_provider_function, custom_prepare_model_function: Build this rank's part of the model, and wrap it.
        custom_megatron_datasets_provider_function: Returns the datasets for training, validation and test.
        custom_get_batch_function, custom_loss_function: Read a micro-batch, and compute its loss from the model's output.
        other_megatron_args (`dict`, *optional*): Further arguments, by Megatron's names; they take precedence.
    """

    distributed_type: ClassVar[DistributedType] = DistributedType.MEGATRON_LM
    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS | {"cpu"}
    main_process: ClassVar[Literal["first", "last"]] = "last"  # only the last pipeline stage has the loss

    tp_degree: int = _launched("tp_degree", SIZE, 1, "Tensor parallel size.")
    pp_degree: int = _launched("pp_degree", SIZE, 1, "Pipeline parallel size.")
    use_custom_fsdp: bool = _launched("use_custom_fsdp", BOOLEAN, False, "Use Megatron's own FSDP.")
    overlap_cpu_optimizer_d2h_h2d: bool = _launched(
        "overlap_cpu_optimizer_d2h_h2d",
        BOOLEAN,
        False,
        "Overlap the copies of an offloaded optimizer with computation.",
    )
    no_load_optim: bool = _launched("no_load_optim", BOOLEAN, False, "Do not load optimizer states from checkpoints.")
    eod_mask_loss: bool = _launched("eod_mask_loss", BOOLEAN, False, "Mask the loss of end-of-document tokens.")
    no_save_optim: bool = _launched("no_save_optim", BOOLEAN, False, "Do not save optimizer states.")
    optimizer_cpu_offload: bool = _launched(
        "optimizer_cpu_offload", BOOLEAN, False, "Offload optimizer states to CPU memory."
    )
    use_precision_aware_optimizer: bool = _launched(
        "use_precision_aware_optimizer", BOOLEAN, False, "Keep optimizer states in lower precision."
    )
    decoder_last_pipeline_num_layers: int | None = _launched(
        "decoder_last_pipeline_num_layers", COUNT, None, "Layers of the last pipeline stage."
    )
    recompute_granularity: str = _if_given(
        "recompute_granularity",
        one_of("full", "selective", exact=False),
        "full",
        "What is recomputed in the backward pass: full or selective.",
    )
    recompute_method: str = _if_given(
        "recompute_method",
        one_of("uniform", "block", exact=False),
        "uniform",
        "How recomputed layers are chosen: uniform or block.",
    )
    recompute_num_layers: int = _if_given("recompute_num_layers", COUNT, 1, "Layers that are recomputed at a time.")
    attention_backend: bool = _if_given(
        "attention_backend", BOOLEAN, True, "Let Megatron choose the attention implementation."
    )
    expert_model_parallel_size: int = _if_given("expert_model_parallel_size", SIZE, 1, "Expert parallel size.")
    context_parallel_size: int = _if_given("context_parallel_size", SIZE, 1, "Context parallel size.")
    attention_dropout: float = _if_given("attention_dropout", PROBABILITY, 0.0, "Attention dropout.")
    hidden_dropout: float = _if_given("hidden_dropout", PROBABILITY, 0.0, "Hidden dropout.")
    attention_softmax_in_fp32: bool = _if_given(
        "attention_softmax_in_fp32", BOOLEAN, True, "Attention softmax in float32."
    )
    expert_tensor_parallel_size: int = _if_given(
        "expert_tensor_parallel_size", SIZE, 1, "Tensor parallel size of experts."
    )
    calculate_per_token_loss: bool = _if_given(
        "calculate_per_token_loss", BOOLEAN, True, "Average the loss over tokens, not over micro-batches."
    )
    use_rotary_position_embeddings: bool = _if_given(
        "use_rotary_position_embeddings", BOOLEAN, True, "Use rotary position embeddings."
    )
    num_micro_batches: int = _if_given("num_micro_batches", SIZE, 1, "Micro-batches per step and process.")
    gradient_clipping: float = _launched(
        "gradient_clipping", NOT_NEGATIVE, 1.0, "Maximum gradient norm for gradient clipping; 0 for none."
    )
    sequence_parallelism: bool = _if_given(
        "sequence_parallelism", BOOLEAN, False, "Sequence parallelism of activations among tensor-parallel ranks."
    )
    recompute_activations: bool = _if_given(
        "recompute_activations", BOOLEAN, False, "Recompute activations in the backward pass."
    )
    use_distributed_optimizer: bool = _if_given(
        "use_distributed_optimizer", BOOLEAN, False, "Shard optimizer states among data-parallel ranks."
    )
    pipeline_model_parallel_split_rank: int | None = option(None, kind=COUNT)
    num_layers_per_virtual_pipeline_stage: int | None = option(None, kind=SIZE)
    is_train_batch_min: bool = option(True, kind=BOOLEAN)
    train_iters: int | None = option(None, kind=SIZE)
    train_samples: int | None = option(None, kind=SIZE)
    weight_decay_incr_style: str = option("constant", kind=suggested("constant", "linear", "cosine"))
    start_weight_decay: float | None = option(None, kind=NUMBER)
    end_weight_decay: float | None = option(None, kind=NUMBER)
    lr_decay_style: str = option("linear", kind=suggested("linear", "cosine", "constant", "inverse-square-root"))
    lr_decay_iters: int | None = option(None, kind=COUNT)
    lr_decay_samples: int | None = option(None, kind=COUNT)
    lr_warmup_iters: int | None = option(None, kind=COUNT)
    lr_warmup_samples: int | None = option(None, kind=COUNT)
    lr_warmup_fraction: float | None = option(None, kind=PROBABILITY)
    min_lr: float = option(0, kind=NUMBER)
    consumed_samples: list[int] | None = option(None, kind=SAMPLE_COUNTS)
    no_wd_decay_cond: Callable[..., Any] | None = option(None, kind=FUNCTION)
    scale_lr_cond: Callable[..., Any] | None = option(None, kind=FUNCTION)
    lr_mult: float = option(1.0, kind=NUMBER)
    megatron_dataset_flag: bool = option(False, kind=BOOLEAN)
    seq_length: int | None = option(None, kind=SIZE)
    encoder_seq_length: int | None = option(None, kind=SIZE)
    decoder_seq_length: int | None = option(None, kind=SIZE)
    tensorboard_dir: str | None = option(None, kind=TEXT)
    set_all_logging_options: bool = option(False, kind=BOOLEAN)
    eval_iters: int = option(100, kind=COUNT)
    eval_interval: int = option(1000, kind=SIZE)
    return_logits: bool = option(False, kind=BOOLEAN)
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = option(None, kind=MAPPING)
    custom_model_provider_function: Callable[..., Any] | None = option(None, kind=FUNCTION)
    custom_prepare_model_function: Callable[..., Any] | None = option(None, kind=FUNCTION)
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = option(None, kind=FUNCTION)
    custom_get_batch_function: Callable[..., Any] | None = option(None, kind=FUNCTION)
    custom_loss_function: Callable[..., Any] | None = option(None, kind=FUNCTION)
    other_megatron_args: dict[str, Any] | None = option(None, kind=MAPPING)
    megatron_lm_default_args: dict[str, Any] = field(init=False, repr=False, compare=False)
    DDP_impl: str = field(init=False, repr=False, compare=False)
    data_parallel_size: int = field(init=False, repr=False, compare=False)
    micro_batch_size: int = field(init=False, repr=False, compare=False)
    global_batch_size: int = field(init=False, repr=False, compare=False)
    dataset_args: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        resolve_options(self)
        replaced = self.pp_degree > 1 or self.use_distributed_optimizer
        self.DDP_impl = "local" if replaced else "torch"
        if self.consumed_samples:
            self.consumed_samples = (self.consumed_samples + [0, 0, 0])[:3]
        self.megatron_lm_default_args = {
            **{argument: getattr(self, name) for argument, name in RENAMED_ARGUMENTS.items()},
            **{name: getattr(self, name) for name in SAME_ARGUMENTS},
        }
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args |= self.other_megatron_args or {}

    @override
    def attach(self, state: RunSoFar) -> None:
        """Set Megatron-LM's precision arguments to the mixed precision of the run."""
        self.set_mixed_precision(state.mixed_precision)

    # ---- arguments that depend on what is prepared --------------------------------------------------------------------

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Set the arguments for the sizes of a transformers model.

        Args:
            model: A model whose `config.model_type` has a parser.
            batch_data: A batch, from which sequence lengths are read; its tensors have shape (batch, sequence).

        Raises:
            ValueError: When there is no parser, or the configuration lacks a size.
        """
        find_parser(model.config.model_type)(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision: "fp16" or "bf16"; anything else leaves float32."""
        if mixed_precision == "fp16":
            self.megatron_lm_default_args["fp16"] = True
        elif mixed_precision == "bf16":
            self.megatron_lm_default_args["bf16"] = True
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the micro-batch size, the global batch size and the data parallel size.

        Args:
            micro_batch_size: Samples per micro-batch and process.
            dp_degree: Data parallel size: the number of ranks that read different data.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        self.megatron_lm_default_args |= {
            "data_parallel_size": self.data_parallel_size,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
        }

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Set the arguments from which Megatron-LM builds an optimizer like the given one.

        Args:
            optimizer (`torch.optim.Optimizer`): An Adam or SGD.

        Raises:
            ValueError: For any other optimizer.
        """
        name, defaults = type(optimizer).__name__, optimizer.defaults
        if "adam" in name.lower():
            beta1, beta2 = defaults["betas"]
            chosen = {"optimizer": "adam", "adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": defaults["eps"]}
        elif "sgd" in name.lower():
            chosen = {"optimizer": "sgd", "sgd_momentum": defaults["momentum"]}
        else:
            raise ValueError(f"Megatron-LM does not support the optimizer {name!r}. Use Adam, AdamW or SGD.")
        self.megatron_lm_default_args |= {**chosen, "lr": defaults["lr"], "weight_decay": defaults["weight_decay"]}

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Set the length of the learning rate schedule from a scheduler, where the plugin does not set it.

        Args:
            scheduler (`MegatronLMDummyScheduler`): With `total_num_steps` and `warmup_num_steps`, counted over all
                data-parallel processes.

        Raises:
            ValueError: When neither the plugin nor the scheduler has the length.
        """
        if self.train_iters is None:
            self.train_iters = self._per_process(scheduler, "total_num_steps", "train_iters")
            self._drop("train_samples", None)
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = self._per_process(scheduler, "warmup_num_steps", "lr_warmup_iters")
            self._drop("lr_warmup_samples", 0)
        self.megatron_lm_default_args |= {name: getattr(self, name) for name in SCHEDULE_ARGUMENTS}

    def _per_process(self, scheduler: Any, source: str, name: str) -> int:
        num_steps, dp_degree = (
            getattr(scheduler, source, None),
            self.megatron_lm_default_args.get("data_parallel_size"),
        )
        if num_steps is None or dp_degree is None:
            missing = f"{type(scheduler).__name__}.{source}" if num_steps is None else "the data-parallel size"
            raise ValueError(
                f"MegatronLMPlugin.{name} cannot be derived, because {missing} is not known. Set {name}, or pass a "
                "MegatronLMDummyScheduler to prepare() together with the model and the data loader."
            )
        return int(num_steps // dp_degree)

    def _drop(self, name: str, replacement: int | None) -> None:
        if getattr(self, name) is not None:
            warn_user(
                f"MegatronLMPlugin.{name}={getattr(self, name)!r} has no effect, because the scheduler counts steps. "
                f"Set {name.replace('samples', 'iters')}, or leave it out."
            )
        setattr(self, name, replacement)

    def set_tensorboard_logging_options(self) -> None:
        """Enable all logging options of Megatron-LM.

        Raises:
            MissingLibraryError: When Megatron-LM is not installed.
        """
        from argparse import ArgumentParser

        try:
            from megatron.training.arguments import _add_logging_args
        except ImportError:
            raise missing_library("megatron-lm", why="MegatronLMPlugin(set_all_logging_options=True)") from None
        self.dataset_args = vars(_add_logging_args(ArgumentParser()).parse_args([]))
        for name, value in self.dataset_args.items():
            if name.startswith("log_") and isinstance(value, bool):
                self.megatron_lm_default_args[name] = True
