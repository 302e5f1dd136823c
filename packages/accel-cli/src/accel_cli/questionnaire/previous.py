"""Defaults of the questions from an existing config file, and what new answers change in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from accel_cli.configfile.schema import BaseConfig
from accel_cli.questionnaire.engines import MEGATRON_PREFIX
from accel_cli.questionnaire.machine import MACHINES
from accel_cli.questionnaire.question import Answers, Question, Topic

ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
BASIC_MEGATRON = (
    "tp_degree", "sequence_parallelism", "pp_degree", "num_micro_batches", "recompute_activations",
    "use_distributed_optimizer", "gradient_clipping",
)  # fmt: skip


def previous_answers(config: BaseConfig) -> dict[str, Any]:
    """Return the answers from which a config file would result.

    Args:
        config: The content of the file.

    Returns:
        Question key -> value as in the file; values may be invalid as answers.
    """
    settings = _flat(config)
    return settings | {key: implied(settings) for key, implied in IMPLIED.items()}


def with_defaults(topics: Iterable[Topic], previous: Answers) -> tuple[Topic, ...]:
    """Return questions whose defaults are earlier answers, where these are still valid.

    Args:
        topics: The questions.
        previous: The answers of `previous_answers`.
    """
    return tuple(replace(topic, questions=tuple(with_default(row, previous) for row in topic.questions))
                 for topic in topics)  # fmt: skip


def with_default(question: Question, previous: Answers) -> Question:
    """Return a question whose default is the earlier answer, if it is still valid after the answers before it."""
    if previous.get(question.key) is None:
        return question
    # an empty answer keeps the default, so that something else must leave it out
    text = question.text if question.is_required else f"{question.text}; - for none"
    return replace(question, text=text, default=partial(_earlier, question, previous[question.key]))


def changes(before: BaseConfig, after: BaseConfig) -> list[str]:
    """List the settings that differ, one line each: `num_processes: 2 -> 4`."""
    old, new = _flat(before), _flat(after)
    lines = [f"{key}: {old.get(key, 'not set')} -> {value}" for key, value in new.items() if old.get(key) != value]
    return lines + [f"{key}: {value} -> removed" for key, value in old.items() if key not in new]


def _flat(config: BaseConfig) -> dict[str, Any]:
    """The settings of all sections side by side: names of options are unique."""
    settings: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        settings.update(value if isinstance(value, dict) else {key: value})
    return settings


def _earlier(question: Question, value: Any, answers: Answers) -> Any:
    text = question.kind.spell(value) if isinstance(value, list) else str(value)  # labels are for valid values alone
    try:
        return question.read(text, answers)
    except ValueError:  # not an answer to this question, or not with the answers before it
        return question.initial(answers)


def _machine(settings: Mapping[str, Any]) -> str:
    kind = settings["distributed_type"]
    if kind in [value for value, _ in MACHINES.options]:
        return str(kind)
    if settings.get("use_cpu"):
        return "MULTI_CPU" if kind == "FSDP" else "NO"
    return "MULTI_GPU"


def _engine(settings: Mapping[str, Any]) -> str:
    kind = settings["distributed_type"]
    return str(kind) if kind in ENGINES else "PLAIN"


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda settings: any(settings.get(key) not in (None, "") for key in keys)


def _has_others(prefix: str, *keys: str) -> Callable[[Mapping[str, Any]], bool]:
    names = {f"{prefix}{key}" for key in keys}
    return lambda settings: any(key.startswith(prefix) and key not in names for key in settings)


def _commands(settings: Mapping[str, Any]) -> str:
    if settings.get("command_file"):
        return "file"
    return "typed" if settings.get("commands") else "none"


# questions whose answers are not saved: key -> what the settings say about them
IMPLIED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "machine": _machine,
    "way": _engine,
    "knows_blocks": lambda settings: not settings.get("fsdp_transformer_layer_cls_to_wrap"),
    "has_deepspeed_file": _has("deepspeed_config_file"),
    "clips_gradients": _has("gradient_clipping"),
    "has_experts": _has("deepspeed_moe_layer_cls_names"),
    "sets_more": _has_others(MEGATRON_PREFIX, *BASIC_MEGATRON),
    "combines": _has_others("parallelism_config_", "dp_shard_size"),
    "uses_mpirun": _has("mpirun_hostfile", "mpirun_ccl"),
    "commands_from": _commands,
    "compiles": _has("dynamo_backend"),
    "compiles_otherwise": _has_others("dynamo_", "backend"),
    "credentials": lambda settings: "profile" if settings.get("profile") else "environment",
    "has_image": _has("image_uri"),
    "has_inputs": _has("sagemaker_inputs_file"),
    "has_metrics": _has("sagemaker_metrics_file"),
}
