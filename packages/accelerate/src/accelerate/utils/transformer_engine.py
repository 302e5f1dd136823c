"""Compatibility path for 8-bit floats with Transformer Engine."""

from accel_integrations.precision.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accel_integrations.precision.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accel_integrations.precision.transformer_engine import convert_model as convert_model
from accel_integrations.precision.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accel_ops.dtypes import GatheredParameters as GatheredParameters
from accel_state.hardware import is_hpu_available as is_hpu_available
from accel_state.libraries import is_transformer_engine_available as is_transformer_engine_available
