"""Compatibility path for a mixed bag: what has a better place is re-exported, and what nothing else needs is here."""

from accel_cli.launch.machine import free_port, is_free
from accel_integrations.compile import compile_regions as compile_regions
from accel_integrations.compile import compile_regions_deepspeed as compile_regions_deepspeed
from accel_integrations.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from accel_integrations.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accel_ops.collectives.tensors import wait_for_everyone as wait_for_everyone
from accel_ops.files.serialization import allowed_globals
from accel_ops.files.serialization import load as load
from accel_ops.files.serialization import save as save
from accel_ops.files.tensor_files import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accel_ops.memory import convert_bytes as convert_bytes
from accel_ops.modules import get_model_tp_size as get_model_tp_size
from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accel_ops.modules import get_pretty_name as get_pretty_name
from accel_ops.modules import has_compiled_regions as has_compiled_regions
from accel_ops.modules import has_repeated_blocks as has_repeated_blocks
from accel_ops.modules import is_compiled_module as is_compiled_module
from accel_ops.modules import is_repeated_blocks as is_repeated_blocks
from accel_ops.modules import model_has_dtensor as model_has_dtensor
from accel_ops.nested import merge_dicts as merge_dicts
from accel_ops.nested import recursive_getattr as recursive_getattr
from accel_state.clusters import DEFAULT_PORT
from accel_state.kernel import check_os_kernel as check_os_kernel
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here

TORCH_SAFE_GLOBALS = allowed_globals()
get_free_port = free_port


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a program listens on a port of this machine.

    Args:
        port (`int`, *optional*): The port; by default 29500, that of the rendezvous.
    """
    return not is_free(DEFAULT_PORT if port is None else int(port))
