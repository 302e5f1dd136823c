"""The old path of what builds launches and of what started processes run first."""

from accel_cli.launch.old_names import env_var_path_add as env_var_path_add
from accel_cli.launch.old_names import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accel_cli.launch.old_names import prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config
from accel_cli.launch.old_names import prepare_multi_gpu_env as prepare_multi_gpu_env
from accel_cli.launch.old_names import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accel_cli.launch.old_names import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accel_cli.launch.old_names import prepare_tpu as prepare_tpu
from accel_cli.launch.old_names import setup_fp8_env as setup_fp8_env
from accel_cli.notebook import PrepareForLaunch as PrepareForLaunch
from accelerate.neighbours import found_among_neighbours

__getattr__ = found_among_neighbours(__name__)  # what others import from here
