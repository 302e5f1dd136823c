"""What an import of this package brings along, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import accel_state
import accel_state.settings
from accel_state.lazy import lazy_exports

SETTINGS = sorted(path.stem for path in Path(str(accel_state.settings.__file__)).parent.glob("[!_]*.py"))
TORCH_FREE = [
    "accel_state", "accel_state.clusters", "accel_state.constants", "accel_state.enums", "accel_state.environment",
    "accel_state.errors", "accel_state.libraries", "accel_state.numa", "accel_state.nvidia", "accel_state.shared",
    "accel_state.gradient_state", "accel_state.mesh", *(f"accel_state.settings.{name}" for name in SETTINGS),
]  # fmt: skip
WITH_TORCH = ["accel_state.accelerator_state", "accel_state.logging", "accel_state.devices", "accel_state.processes"]
HEAVY = [
    "packaging", "psutil", "yaml", "huggingface_hub", "transformers", "deepspeed", "tqdm", "torch._dynamo",
    "torch.distributed.fsdp", "torch.distributed.checkpoint",
]  # fmt: skip


def _loaded_by(imports: str, asked: list[str], before: str = "sys", warnings: str = "error") -> set[str]:
    """Which of the modules that are asked for come with these imports, and not with those before."""
    code = f"import sys, {before}; before = {{*sys.modules}}; import {imports}\n"
    code += f"print(*[name for name in {asked!r} if name in {{*sys.modules}} - before])"
    done = subprocess.run([sys.executable, "-W", warnings, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_reading_settings_does_not_load_torch() -> None:
    assert _loaded_by(", ".join(TORCH_FREE), ["torch", "numpy", *HEAVY]) == set()


def test_the_states_load_nothing_heavy_beside_torch() -> None:
    assert _loaded_by(", ".join(WITH_TORCH), HEAVY, before="torch", warnings="default") == set()


def test_every_name_of_the_package_is_there() -> None:
    assert set(accel_state.__all__) <= set(dir(accel_state))
    for name in accel_state.__all__:
        assert getattr(accel_state, name) is not None
    with pytest.raises(AttributeError, match="module 'accel_state' has no attribute 'no_such_name'"):
        _ = accel_state.no_such_name


def test_names_may_be_exported_under_another_one() -> None:
    get, listing, names = lazy_exports(__name__, {"os.path": "join=join basename_of=basename"})
    assert names == ["basename_of", "join"]
    assert get("basename_of")("a/b") == "b"
    assert "basename_of" in listing()
