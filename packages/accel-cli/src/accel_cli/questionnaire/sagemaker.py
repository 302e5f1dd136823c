"""Questions about jobs on Amazon SageMaker."""

from __future__ import annotations

from accel_cli.configfile.schema import SageMakerConfig
from accel_cli.questionnaire.answer import Choice, Number, Text, Truth, choice
from accel_cli.questionnaire.precision import DTYPE, DYNAMO
from accel_cli.questionnaire.previous import with_defaults
from accel_cli.questionnaire.prompts import Prompts, choose_prompts
from accel_cli.questionnaire.question import Answers, Question, Topic, about, interview, opposite, said, settings_of
from accel_state.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES
from accel_state.enums import ComputeEnvironment

WAYS = Choice(
    (
        ("NO", "one process on each machine"),
        ("DATA_PARALLEL", "data parallelism"),
        ("MODEL_PARALLEL", "model parallelism"),
    )
)
CREDENTIALS = Choice(
    (
        ("profile", "an AWS profile of this machine"),
        ("environment", "the environment variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    )
)
NAME = Text(without_blanks=True)


ACCOUNT = Topic(
    "Amazon Web Services",
    (
        Question("credentials", "How do you sign in?", CREDENTIALS, "profile", is_saved=False),
        Question("profile", "Which profile?", NAME, "default", said("credentials", "profile")),
        Question("region", "In which region?", NAME, "us-east-1"),
        Question("iam_role_name", "Which IAM role do jobs have? Its name or ARN", NAME),
    ),
)
JOB = Topic(
    "Job",
    (
        Question("has_image", "Have you got a Docker image of your own to use?", Truth(), False, is_saved=False),
        Question("image_uri", "What is its URI?", NAME, None, said("has_image")),
        Question("has_inputs", "Are there data channels, listed in a TSV file?", Truth(), False, is_saved=False),
        Question("sagemaker_inputs_file", "Where is the file, seen from the script?", Text(), None,
                 said("has_inputs")),
        Question("has_metrics", "Are there metrics to follow, listed in a TSV file?", Truth(), False, is_saved=False),
        Question("sagemaker_metrics_file", "Where is the file, seen from the script?", Text(), None,
                 said("has_metrics")),
        Question("distributed_type", "Which kind of parallelism has the job?", WAYS, "NO"),
        Question("ec2_instance_type", "On which type of machine?", choice(*SAGEMAKER_PARALLEL_EC2_INSTANCES),
                 SAGEMAKER_PARALLEL_EC2_INSTANCES[0], said("distributed_type", "DATA_PARALLEL")),
        Question("ec2_instance_type", "On which type of machine?", NAME, "ml.p3.2xlarge",
                 opposite(said("distributed_type", "DATA_PARALLEL"))),
        Question("num_machines", "On how many of them?", Number(least=1), 1, said("distributed_type", "NO")),
        Question("num_machines", "On how many of them?", Number(least=1), 2,
                 opposite(said("distributed_type", "NO"))),
        about("debug", False, opposite(said("distributed_type", "NO"))),
        Question("base_job_name", "How do the names of jobs begin?", NAME, "accelerate-sagemaker-1"),
        about("mixed_precision", "no", text=DTYPE),
    ),
)  # fmt: skip

TOPICS = (ACCOUNT, JOB, DYNAMO)


def get_sagemaker_input(prompts: Prompts | None = None, previous: Answers | None = None) -> SageMakerConfig:
    """Ask for the settings of jobs on Amazon SageMaker.

    Args:
        prompts: The object that asks; chosen by the terminal when None.
        previous: Earlier answers, which are the defaults.

    Raises:
        KeyboardInterrupt: The user interrupts.
        ValueError: The answers end too early.
    """
    answers = interview(with_defaults(TOPICS, previous or {}), prompts or choose_prompts())
    return sagemaker_config(answers)


def sagemaker_config(answers: Answers) -> SageMakerConfig:
    """Turn answers into settings."""
    values = {"debug": False, **settings_of(TOPICS, answers)}
    return SageMakerConfig(compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER, use_cpu=False, **values)
