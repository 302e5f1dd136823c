"""Launches that their flags alone determine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

OF_LAUNCHES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


@contextmanager
def unconfigured() -> Iterator[tuple[str, dict[str, str]]]:
    """Leave the default config file and the settings in environment variables out.

    Yields:
        A config file without settings, for `--config_file`, and the environment variables of the launch.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        path = os.path.join(folder, "settings.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write("distributed_type: 'NO'\n")
        yield path, {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHES)}
