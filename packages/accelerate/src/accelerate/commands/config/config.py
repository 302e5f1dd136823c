"""Compatibility path for the questionnaire and its parser."""

from accel_cli.config import HELP as HELP
from accel_cli.config import config_command as config_command
from accel_cli.config import config_command_parser as config_command_parser
from accel_cli.config import get_config_parser as get_config_parser
from accel_cli.config import get_user_input as get_user_input
from accel_cli.configfile.location import cache_dir as cache_dir
from accel_cli.configfile.location import default_config_file as default_config_file
from accel_cli.configfile.location import default_yaml_config_file as default_yaml_config_file
from accel_cli.configfile.read import load_config_from_file as load_config_from_file
from accel_cli.main import config_main as config_main
from accel_cli.questionnaire.cluster import get_cluster_input as get_cluster_input
from accel_cli.questionnaire.sagemaker import get_sagemaker_input as get_sagemaker_input

description = HELP
main = config_main
