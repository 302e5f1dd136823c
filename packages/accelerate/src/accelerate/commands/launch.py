"""Compatibility path for `accelerate launch`."""

import sys

from accel_cli.launch.command import launch_command as launch_command
from accel_cli.launch.command import launch_command_parser as launch_command_parser
from accel_cli.main import launch_main as main
from accelerate.compat.launching import CustomHelpFormatter as CustomHelpFormatter
from accelerate.compat.launching import clean_option as clean_option
from accelerate.compat.launching import deepspeed_launcher as deepspeed_launcher
from accelerate.compat.launching import filter_arguments as _filter_args  # noqa: F401
from accelerate.compat.launching import multi_gpu_launcher as multi_gpu_launcher
from accelerate.compat.launching import options_to_group as options_to_group
from accelerate.compat.launching import sagemaker_launcher as sagemaker_launcher
from accelerate.compat.launching import settle_arguments as _validate_launch_command  # noqa: F401
from accelerate.compat.launching import simple_launcher as simple_launcher
from accelerate.compat.launching import tpu_launcher as tpu_launcher
from accelerate.compat.launching import tpu_pod_launcher as tpu_pod_launcher

if __name__ == "__main__":
    sys.exit(main())
