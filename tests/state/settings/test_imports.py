"""The command line reads the settings' fields, so none of their modules may import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import accel_state.settings

MODULES = sorted(path.stem for path in Path(accel_state.settings.__file__).parent.glob("*.py"))


def test_no_settings_module_imports_a_library() -> None:
    names = ["accel_state.mesh", *(f"accel_state.settings.{name}" for name in MODULES if name != "__init__")]
    code = (
        f"import sys; {'; '.join(f'import {name}' for name in names)}\n"
        "heavy = {'torch', 'packaging', 'numpy', 'yaml', 'psutil', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from dataclasses import fields\n"
        "from accel_state.settings.fsdp import FullyShardedDataParallelPlugin as plugin\n"
        "from accel_state.settings.option import options_of\n"
        "assert options_of(plugin)['fsdp_version'].env == 'FSDP_VERSION'\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
