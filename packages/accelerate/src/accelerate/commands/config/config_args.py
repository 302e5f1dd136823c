"""Compatibility path for the config file."""

from accel_cli.configfile.location import cache_dir as cache_dir
from accel_cli.configfile.location import default_config_file as default_config_file
from accel_cli.configfile.location import default_json_config_file as default_json_config_file
from accel_cli.configfile.location import default_yaml_config_file as default_yaml_config_file
from accel_cli.configfile.location import hf_cache_home as hf_cache_home
from accel_cli.configfile.read import load_config_from_file as load_config_from_file
from accel_cli.configfile.schema import BaseConfig as BaseConfig
from accel_cli.configfile.schema import ClusterConfig as ClusterConfig
from accel_cli.configfile.schema import SageMakerConfig as SageMakerConfig
