"""Which libraries are installed, and in which version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from accel_state import hardware, libraries
from accel_state.errors import MissingLibraryError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed libraries that is searched first."""
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (libraries._is_found, libraries.installed_version):
        cached.cache_clear()
    yield tmp_path
    for cached in (libraries._is_found, libraries.installed_version):
        cached.cache_clear()


def _install(site: Path, module: str, version: str = "1.0", *, distribution: str | None = None) -> None:
    (site / module).mkdir()
    (site / module / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    name = distribution or module
    record = site / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_installed_library_is_found_without_being_imported(site: Path) -> None:
    assert not libraries.is_msamp_available()  # which is not published any more
    (site / "msamp").mkdir()  # as wandb makes one for its runs
    libraries._is_found.cache_clear()
    assert not libraries.is_msamp_available()
    (site / "msamp").rmdir()
    libraries._is_found.cache_clear()
    libraries.installed_version.cache_clear()
    _install(site, "msamp")
    assert libraries.is_msamp_available()
    assert "msamp" not in sys.modules


def test_what_was_imported_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clearml", types.ModuleType("clearml"))
    assert libraries.is_clearml_available()
    monkeypatch.setitem(sys.modules, "clearml", None)  # the way to forbid an import
    assert not libraries.is_clearml_available()


def test_a_library_may_have_several_distribution_names(site: Path) -> None:
    _install(site, "pynvml", distribution="nvidia-ml-py")
    assert libraries.is_pynvml_available()


@pytest.mark.parametrize(("version", "expected"), [("0.6.0", False), ("0.6.1", True), ("0.10.0", True)])
def test_a_library_that_is_too_old_is_not_available(site: Path, version: str, expected: bool) -> None:
    _install(site, "torchao", version)
    assert libraries.is_torchao_available() is expected
    assert libraries.is_fp8_available() is expected


def test_bitsandbytes_by_version(site: Path) -> None:
    _install(site, "bitsandbytes", "0.40.0")
    assert libraries.is_bnb_available()
    assert libraries.is_bnb_available(min_version="0.40")
    assert not libraries.is_bnb_available(min_version="0.41")
    assert libraries.is_8bit_bnb_available()
    assert libraries.is_4bit_bnb_available()
    assert not libraries.is_bitsandbytes_multi_backend_available()


def test_rich_must_be_asked_for(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(site, "rich")
    assert not libraries.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    assert libraries.is_rich_available()


def test_megatron_core_is_needed_and_asked_for(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "megatron" / "energy").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site)])  # where no other part of the package is installed
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert not libraries.is_megatron_lm_available()
    (site / "megatron" / "core").mkdir()
    assert libraries.is_megatron_lm_available()
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    assert not libraries.is_megatron_lm_available()


def test_every_question_has_an_answer_here() -> None:
    unanswered = {"is_torch_version", "is_installed"}  # these take arguments
    questions = {**vars(hardware), **vars(libraries)}
    names = [name for name in questions if name.startswith("is_") and name not in {*unanswered, "is_gaudi1"}]
    assert len(names) > 55
    for name in names:
        assert isinstance(questions[name](), bool), name
    for name in ("numpy", "pytest", "tqdm"):
        assert getattr(libraries, f"is_{name}_available")(), name
    assert libraries.is_torchdata_available() == (importlib.util.find_spec("torchdata") is not None)
    assert libraries.is_torchdata_stateful_dataloader_available() == libraries.is_torchdata_available()
    assert libraries.is_torch_distributed_available()
    assert libraries.is_pippy_available()
    assert not libraries.is_xccl_available()
    assert libraries.is_wandb_available.__name__ == "is_wandb_available"
    assert libraries.is_torchao_available.__doc__ == "True when torchao 0.6.1 or later is installed."


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "version", "expected"),
    [(">=", "2.9", True), ("<", "2.9", False), (">", "1.0", True), ("!=", "1.0", True), ("==", "1.0", False)],
)
def test_the_version_of_torch(operation: str, version: str, expected: bool) -> None:
    assert libraries.is_torch_version(operation, version) is expected


def test_versions_compare_as_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.compare_versions(libraries.parse_version("2.10"), ">", "2.9")
    assert libraries.torch_version == libraries.parse_version(importlib.metadata.version("torch"))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = libraries.no_such_name
    with pytest.raises(ValueError, match="operation='~=' is unknown"):
        libraries.compare_versions("torch", "~=", "2")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        libraries.compare_versions("no-such-library", ">", "2")
    monkeypatch.setattr(libraries, "installed_version", lambda name: "2.13.0+cu130")
    assert libraries.compare_versions("torch", "==", "2.13.0"), "a mark of the build does not make a version newer"
    assert not libraries.compare_versions("torch", ">", "2.13.0")


# ---- decorators -----------------------------------------------------------------------------------------------------


def test_a_function_that_needs_a_library_says_so_unless_it_is_there(
    monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # another test may have used it

    @libraries.deepspeed_required
    def train() -> None:
        """Train."""

    assert train.__name__ == "train"
    with pytest.raises(MissingLibraryError, match=r"train\(\) needs the library 'deepspeed'"):
        train()
    _install(site, "torchao", "1.0")

    @libraries.torchao_required
    def convert(number: int) -> int:
        return number + 1

    assert convert(1) == 2
