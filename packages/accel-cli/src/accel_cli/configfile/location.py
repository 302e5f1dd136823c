"""The path of the default config file."""

from __future__ import annotations

import os
from collections.abc import Mapping

FILE_NAME = "default_config.yaml"


def hub_home(environ: Mapping[str, str]) -> str:
    """Folder that the Hugging Face libraries share: `HF_HOME`, or in the user's cache."""
    cache = environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    return os.path.expanduser(environ.get("HF_HOME", os.path.join(cache, "huggingface")))


def config_folder(environ: Mapping[str, str]) -> str:
    """Folder of the default config file."""
    return os.path.join(hub_home(environ), "accelerate")


def default_config_path(environ: Mapping[str, str]) -> str:
    """Path of the default config file, whether it exists or not."""
    return os.path.join(config_folder(environ), FILE_NAME)


# read by other libraries; with the environment variables at the first import of this module
hf_cache_home = hub_home(os.environ)
cache_dir = config_folder(os.environ)
default_config_file = default_yaml_config_file = default_json_config_file = default_config_path(os.environ)
