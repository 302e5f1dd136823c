"""Compatibility path for what builds launches and of what started processes run first."""

import subprocess as subprocess
from argparse import Namespace
from shutil import which as which

from typing_extensions import override

from accel_cli.launch.machine import Machine
from accel_cli.launch.runners.sagemaker import hyperparameters as _convert_nargs_to_dict  # noqa: F401
from accel_cli.notebook import PrepareForLaunch as PrepareForLaunch
from accelerate.compat import launching
from accelerate.compat.launching import env_var_path_add as env_var_path_add
from accelerate.compat.launching import filter_arguments as _filter_args  # noqa: F401
from accelerate.compat.launching import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accelerate.compat.launching import prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config
from accelerate.compat.launching import prepare_multi_gpu_env as prepare_multi_gpu_env
from accelerate.compat.launching import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accelerate.compat.launching import prepare_tpu as prepare_tpu
from accelerate.compat.launching import setup_fp8_env as setup_fp8_env
from accelerate.compat.legacy import legacy_getattr
from accelerate.compat.seams import late_bound

__getattr__ = legacy_getattr(__name__)  # what programs import from here


class _ThisMachine(Machine):
    """Finds programs by the `which` of this module, which is a seam."""

    @override
    def find_program(self, name: str) -> str | None:
        path: str | None = late_bound("accelerate.utils.launch", "which")(name)
        return path


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command for one process, or for mpirun when there is a hostfile, and its whole environment.

    Args:
        args: The parsed command line of `accelerate launch`.
    """
    return launching.prepare_simple_launcher_cmd_env(args, _ThisMachine())


def _get_mpirun_args() -> tuple[str, str, str, str, str]:
    """Return how mpirun is called, as `accelerate.compat.launching.mpirun_words` does."""
    return launching.mpirun_words(_ThisMachine())
