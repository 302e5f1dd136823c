"""The old path of the settings file."""

import os

from accel_cli.configfile.location import config_folder, default_config_path
from accel_cli.configfile.location import hub_home as _hub_home
from accel_cli.configfile.read import load_config_from_file as load_config_from_file
from accel_cli.configfile.schema import BaseConfig as BaseConfig
from accel_cli.configfile.schema import ClusterConfig as ClusterConfig
from accel_cli.configfile.schema import SageMakerConfig as SageMakerConfig

hf_cache_home = _hub_home(os.environ)
cache_dir = config_folder(os.environ)
default_config_file = default_config_path(os.environ)
default_json_config_file = os.path.join(cache_dir, "default_config.yaml")  # also holds JSON, since version 1
default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
