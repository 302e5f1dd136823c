"""The old path of questions about models."""

from accel_integrations.precision.old_names import get_grad_scaler as get_grad_scaler
from accel_integrations.precision.old_names import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel_ops.modules import is_peft_model as is_peft_model
