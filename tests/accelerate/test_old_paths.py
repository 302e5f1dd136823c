"""What lives at an old path because nothing else needs it."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest

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
def test_old_kernels_are_warned_about(system: str, release: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(system=system, release=release)
    monkeypatch.setattr(other.platform, "uname", lambda: found)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.check_os_kernel()
    assert bool(caught) is warns


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
    with pytest.raises(ImportError, match="pip install rich"):
        importlib.import_module("accelerate.utils.rich")
    installed: list[dict[str, Any]] = []
    traceback = types.ModuleType("rich.traceback")
    traceback.install = lambda **options: installed.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.traceback", traceback)
    importlib.import_module("accelerate.utils.rich")
    assert installed == [{"show_locals": False}]
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)
