"""The old path of `accelerate launch`."""

import sys

from accel_cli.launch.command import launch_command as launch_command
from accel_cli.launch.command import launch_command_parser as launch_command_parser
from accel_cli.launch.old_names import CustomHelpFormatter as CustomHelpFormatter
from accel_cli.launch.old_names import clean_option as clean_option
from accel_cli.launch.old_names import deepspeed_launcher as deepspeed_launcher
from accel_cli.launch.old_names import filter_arguments as _filter_args  # noqa: F401
from accel_cli.launch.old_names import multi_gpu_launcher as multi_gpu_launcher
from accel_cli.launch.old_names import options_to_group as options_to_group
from accel_cli.launch.old_names import sagemaker_launcher as sagemaker_launcher
from accel_cli.launch.old_names import settle_arguments as _validate_launch_command  # noqa: F401
from accel_cli.launch.old_names import simple_launcher as simple_launcher
from accel_cli.launch.old_names import tpu_launcher as tpu_launcher
from accel_cli.launch.old_names import tpu_pod_launcher as tpu_pod_launcher
from accel_cli.main import launch_main as main

if __name__ == "__main__":
    sys.exit(main())
