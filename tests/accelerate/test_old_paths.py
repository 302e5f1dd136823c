"""What lives at an old path because nothing else needs it."""

from __future__ import annotations

import importlib
import platform
import socket
import subprocess
import sys
import types
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.compat.legacy_names import LEGACY_NAMES
from accelerate.utils import other, torch_xla


def test_ports() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        assert other.is_port_in_use(listener.getsockname()[1])
    assert not other.is_port_in_use(other.get_free_port())
    assert isinstance(other.is_port_in_use(), bool)


@pytest.mark.parametrize(("system", "release", "warns"), [
    ("Linux", "5.4.0-90-generic", True), ("Linux", "5.5.0", False), ("Linux", "6.1", False), ("Darwin", "1.0", False),
    ("Linux", "custom", False),
])  # fmt: skip
def test_old_kernels_are_warned_about(
    system: str, release: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actual = types.SimpleNamespace(system=system, release=release)
    monkeypatch.setattr(platform, "uname", lambda: actual)
    other.check_os_kernel()
    Accelerator(cpu=True)  # the first one tells, too
    Accelerator(cpu=True)
    assert [record.name for record in caplog.records] == ["accelerate"] * (2 * warns)


def test_xla_is_installed_on_colab_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="pip install torch_xla"):
        torch_xla.install_xla()
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        commands.append(command)

    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(subprocess, "run", run)
    torch_xla.install_xla(upgrade=True)
    assert commands[0][-2:] == ["--upgrade", "pip"]
    assert commands[1][-1].startswith("torch_xla[tpu]==2.")


def test_rich_tracebacks_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.traceback", None)
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'accelerate\[rich\]'"):
        importlib.import_module("accelerate.utils.rich")
    installed: list[dict[str, Any]] = []
    traceback = types.ModuleType("rich.traceback")
    traceback.install = lambda **options: installed.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.traceback", traceback)
    importlib.import_module("accelerate.utils.rich")
    assert installed == [{"show_locals": False}]
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)


# ---- names that modules had because they used them ----------------------------------------------------------------


@pytest.mark.parametrize("path", LEGACY_NAMES)
def test_names_are_found_where_they_were_used(path: str) -> None:
    module = importlib.import_module(path)
    names = [entry.partition("=")[0] for names in LEGACY_NAMES[path].values() for entry in names.split()]
    assert names
    assert [name for name in names if not hasattr(module, name)] == []


def test_a_name_is_the_same_object_everywhere() -> None:
    state, enums = importlib.import_module("accelerate.state"), importlib.import_module("accel_state.enums")
    assert state.DistributedType is enums.DistributedType
    assert not hasattr(state, "gather")  # which that module of 1.15 has not


def test_names_that_are_nowhere_are_missing() -> None:
    state = importlib.import_module("accelerate.state")
    with pytest.raises(AttributeError, match=r"module 'accelerate.state' has no attribute 'nothing'"):
        _ = state.nothing
    assert not hasattr(state, "_export")  # private ones are not looked for
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from accelerate.state import nothing")


def test_the_bundled_programs_are_reached_by_name() -> None:
    from accelerate.test_utils import test_ops, test_script, test_sync

    assert all(callable(program.main) for program in (test_ops, test_script, test_sync))


def test_what_a_module_only_used_can_be_replaced_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import accelerator

    monkeypatch.setattr("accelerate.accelerator.is_bitsandbytes_multi_backend_available", lambda: True)
    assert accelerator.is_bitsandbytes_multi_backend_available()
    assert callable(accelerator.fsdp2_prepare_model)
