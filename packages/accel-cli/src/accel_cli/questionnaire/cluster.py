"""All questions but those about SageMaker, in order."""

from __future__ import annotations

import os
from typing import Any

from accel_cli.configfile.schema import BaseConfig, ClusterConfig
from accel_cli.questionnaire.answer import Choice
from accel_cli.questionnaire.engines import DEEPSPEED, FSDP, MEGATRON_LM, PARALLELISM, sharding
from accel_cli.questionnaire.machine import MACHINE, MPI, NETWORK, PROCESSES, TPU, placed
from accel_cli.questionnaire.precision import DYNAMO, FP8, PRECISION
from accel_cli.questionnaire.previous import previous_answers, with_default, with_defaults
from accel_cli.questionnaire.prompts import Prompts, choose_prompts
from accel_cli.questionnaire.question import Answers, Question, ask, interview, settings_of
from accel_cli.questionnaire.sagemaker import get_sagemaker_input
from accel_state.enums import ComputeEnvironment

TOPICS = (
    MACHINE, DEEPSPEED, FSDP, NETWORK, PROCESSES, MPI, PARALLELISM, MEGATRON_LM, TPU, DYNAMO, PRECISION, FP8,
)  # fmt: skip

ENVIRONMENT = Question(
    "compute_environment",
    "Where do the processes run?",
    Choice((("LOCAL_MACHINE", "this machine, or a cluster of your own"), ("AMAZON_SAGEMAKER", "Amazon SageMaker"))),
    "LOCAL_MACHINE",
)


def get_user_input(prompts: Prompts | None = None, existing: BaseConfig | None = None) -> BaseConfig:
    """Ask for all settings.

    Args:
        prompts: The object that asks; chosen by the terminal when None.
        existing: Settings whose values are the defaults of the questions.

    Returns:
        `ClusterConfig` or `SageMakerConfig`.

    Raises:
        KeyboardInterrupt: The user interrupts.
        ValueError: The answers end too early.
    """
    prompts = prompts or choose_prompts()
    previous = previous_answers(existing) if existing is not None else {}
    environment = ask(with_default(ENVIRONMENT, previous), prompts, {})
    if environment == ComputeEnvironment.AMAZON_SAGEMAKER.value:
        return get_sagemaker_input(prompts, previous)
    return get_cluster_input(prompts, previous)


def get_cluster_input(prompts: Prompts | None = None, previous: Answers | None = None) -> ClusterConfig:
    """Ask for the settings of machines other than SageMaker.

    Args:
        prompts: As for `get_user_input`.
        previous: Earlier answers, which are the defaults.
    """
    return cluster_config(interview(with_defaults(TOPICS, previous or {}), prompts or choose_prompts()))


def cluster_config(answers: Answers) -> ClusterConfig:
    """Turn answers into settings."""
    values: dict[str, Any] = {"mixed_precision": None, "debug": False, **settings_of(TOPICS, answers)}
    if "parallelism_config" in values:
        values["parallelism_config"] |= sharding(answers)
    if "command_file" in values:  # the commands may be run from another folder
        values["command_file"] = os.path.abspath(values["command_file"])
    return ClusterConfig(compute_environment=ComputeEnvironment.LOCAL_MACHINE, **values | placed(answers))
