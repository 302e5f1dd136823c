"""Compatibility path for 8-bit floats with torchao."""

from accel_integrations.precision.float8_layers import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel_integrations.precision.float8_layers import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from accel_integrations.precision.float8_layers import filter_linear_layers as filter_linear_layers
from accel_integrations.precision.float8_layers import find_first_last_linear_layers as find_first_last_linear_layers
from accel_integrations.precision.float8_layers import has_ao_layers as has_ao_layers
from accel_state.libraries import is_torchao_available as is_torchao_available
from accel_state.libraries import torchao_required as torchao_required
