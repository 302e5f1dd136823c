"""Questions about Megatron-LM."""

from __future__ import annotations

from typing import Any

from accel_cli.questionnaire.answer import Kind, Number, Text, Truth, choice
from accel_cli.questionnaire.question import Answers, Question, Topic, always, said

PREFIX = "megatron_lm_"


def _row(name: str, text: str, kind: Kind, default: Any = None, asked_when: Any = always, **rest: Any) -> Question:
    return Question(f"{PREFIX}{name}", text, kind, default, asked_when, **rest)


def _more(name: str, text: str, kind: Kind, default: Any = None) -> Question:
    """Row of a setting that few need: left out where nothing is said."""
    return _row(name, text, kind, default, said("sets_more"), is_required=False)


def divides_processes(value: int, answers: Answers) -> str:
    """Refuse degrees that do not divide the processes."""
    degree = value * answers.get(f"{PREFIX}tp_degree", 1)
    return f"{answers['num_processes']} processes cannot be divided by {degree}." \
        if answers["num_processes"] % degree else ""  # fmt: skip


MEGATRON_LM = Topic(
    "Megatron-LM",
    (
        _row("tp_degree", "How many processes share every layer (tensor parallelism)?", Number(least=1), 1,
             wrong=divides_processes),
        _row("sequence_parallelism", "Share the sequences among them, too?", Truth(), True,
             lambda answers: answers[f"{PREFIX}tp_degree"] > 1),
        _row("pp_degree", "How many stages has the pipeline?", Number(least=1), 1, wrong=divides_processes),
        _row("num_micro_batches", "How many micro-batches go through it at a time?", Number(least=1), 1,
             lambda answers: answers[f"{PREFIX}pp_degree"] > 1),
        _row("recompute_activations", "Compute activations again in the backward pass? Less memory", Truth(), True),
        _row("use_distributed_optimizer", "Shard the optimizer among data-parallel processes?", Truth(), True),
        _row("gradient_clipping", "To which norm is the gradient limited? 0 for no limit",
             Number(least=0, is_whole=False), 1.0),
        Question("sets_more", "Set recomputation, experts, precision and checkpoints in detail?", Truth(), False,
                 is_saved=False),
        _more("recompute_granularity", "What is computed again?", choice("full", "selective"), "selective"),
        _row("recompute_method", "How are layers chosen for it?", choice("uniform", "block"), "uniform",
             said(f"{PREFIX}recompute_granularity", "full")),
        _row("recompute_num_layers", "How many layers?", Number(least=1), 1,
             said(f"{PREFIX}recompute_granularity", "full")),
        _more("decoder_last_pipeline_num_layers", "How many layers has the last stage? Nothing for as many as others",
              Number(least=1)),
        _more("expert_model_parallel_size", "How many processes share the experts? Nothing for none",
              Number(least=1)),
        _more("expert_tensor_parallel_size", "How many processes share one expert? Nothing for none",
              Number(least=1)),
        _more("context_parallel_size", "How many processes share the sequence? Nothing for none", Number(least=1)),
        _more("attention_backend", "Which implementation of attention? Nothing for the usual one",
              Text(without_blanks=True)),
        _more("attention_dropout", "Dropout in the attention? Nothing for the model's", Number(0, 1, False)),
        _more("hidden_dropout", "Dropout in the hidden state? Nothing for the model's", Number(0, 1, False)),
        _more("attention_softmax_in_fp32", "Compute the attention's softmax in float32?", Truth(), False),
        _more("use_rotary_position_embeddings", "Use rotary position embeddings?", Truth(), False),
        _more("calculate_per_token_loss", "Scale the loss by the number of tokens?", Truth(), False),
        _more("eod_mask_loss", "Leave end-of-document tokens out of the loss?", Truth(), False),
        _more("use_custom_fsdp", "Use Megatron's own sharded data parallelism?", Truth(), False),
        _more("optimizer_cpu_offload", "Keep the optimizer's state in CPU memory?", Truth(), False),
        _row("overlap_cpu_optimizer_d2h_h2d", "Copy it while computing?", Truth(), False,
             said(f"{PREFIX}optimizer_cpu_offload")),
        _more("use_precision_aware_optimizer", "Keep it in lower precision?", Truth(), False),
        _more("no_save_optim", "Leave the optimizer out of checkpoints?", Truth(), False),
        _more("no_load_optim", "Leave it alone when a checkpoint is loaded?", Truth(), False),
    ),
    section="megatron_lm_config",
    asked_when=said("way", "MEGATRON_LM"),
)  # fmt: skip
