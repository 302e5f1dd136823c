"""Compatibility path for the questions about Amazon SageMaker."""

from accel_cli.questionnaire.precision import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accel_cli.questionnaire.sagemaker import get_sagemaker_input as get_sagemaker_input
from accel_state.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
from accel_state.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
