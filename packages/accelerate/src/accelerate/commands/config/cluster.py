"""Compatibility path for the questions about your own machines."""

from accel_cli.questionnaire.cluster import get_cluster_input as get_cluster_input
from accel_cli.questionnaire.precision import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accel_state.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accel_state.constants import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
from accel_state.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accel_state.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accel_state.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accel_state.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accel_state.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
