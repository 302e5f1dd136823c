"""Compatibility path for sharded training."""

from accel_bigmodel.sizes import get_non_persistent_buffers as get_non_persistent_buffers
from accel_integrations.training_state.fsdp_functions import load_fsdp_model as load_fsdp_model
from accel_integrations.training_state.fsdp_functions import load_fsdp_optimizer as load_fsdp_optimizer
from accel_integrations.training_state.fsdp_functions import save_fsdp_model as save_fsdp_model
from accel_integrations.training_state.fsdp_functions import save_fsdp_optimizer as save_fsdp_optimizer
from accel_integrations.training_state.merge import merge_fsdp_weights as merge_fsdp_weights
from accel_ops.files.filenames import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_ops.files.filenames import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_ops.files.filenames import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_ops.files.filenames import WEIGHTS_NAME as WEIGHTS_NAME
from accel_ops.files.serialization import save as save
from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accel_ops.modules import get_parameters_from_modules as get_parameters_from_modules
from accel_ops.modules import is_compiled_module as is_compiled_module
from accel_ops.modules import is_peft_model as is_peft_model
from accel_state.libraries import is_torch_version as is_torch_version
from accel_state.logging import get_logger as get_logger
from accel_state.settings.fsdp_torch import get_module_class_from_name as get_module_class_from_name
from accelerate.compat.fsdp import _get_model_state_dict as _get_model_state_dict
from accelerate.compat.fsdp import _set_model_state_dict as _set_model_state_dict
from accelerate.compat.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.compat.fsdp import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.compat.fsdp import ensure_weights_retied as ensure_weights_retied
from accelerate.compat.fsdp import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.compat.fsdp import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.compat.fsdp import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate.compat.fsdp import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from accelerate.compat.fsdp import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate.compat.fsdp import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.compat.fsdp import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
