"""The progress bar and the profiler on several processes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_state.settings.profile import ProfileKwargs
from accel_tracking import progress
from accel_tracking.profiling import record_profile
from accel_tracking.progress import tqdm
from tests.support.ranks import ranks


def test_the_bar_iterates_and_shows() -> None:
    shown = io.StringIO()
    assert list(tqdm(range(3), desc="epoch", file=shown)) == [0, 1, 2]
    assert "epoch" in shown.getvalue()


@ranks(2)
def test_only_the_first_process_of_a_machine_shows_a_bar(rank: int, world: int) -> None:
    assert tqdm(range(3), file=io.StringIO()).disable is (rank != 0)
    assert tqdm(range(3), main_process_only=False, file=io.StringIO()).disable is False
    assert tqdm(range(3), disable=True).disable is True


def test_the_old_first_argument_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tqdm\(True"):
        tqdm(True, range(3))


def test_a_missing_library_names_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_tqdm_available", lambda: False)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(3))


@ranks(2)
def test_each_process_writes_its_trace(rank: int, world: int, tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "run"
    with record_profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))) as profiler:
        torch.ones(3).add(1)
    assert {path.name for path in folder.iterdir()} == {"profile_0.json", "profile_1.json"}
    events = json.loads((folder / f"profile_{rank}.json").read_text())["traceEvents"]
    assert any("aten::add" in str(event.get("name")) for event in events)
    assert any(event.key == "aten::add" for event in profiler.key_averages())


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with record_profile(ProfileKwargs(activities=["cpu"])) as profiler:
        torch.ones(3).add(1)
    assert profiler.key_averages()
    assert not list(tmp_path.iterdir())


def test_a_schedule_that_never_recorded_warns_instead_of_failing(tmp_path: Path) -> None:
    settings = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with pytest.warns(UserWarning, match="Nothing was recorded"), record_profile(settings) as profiler:
        profiler.step()


def test_a_failing_block_keeps_its_error(tmp_path: Path) -> None:
    settings = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
    with pytest.raises(KeyError), record_profile(settings):
        raise KeyError("mine")
    assert not (tmp_path / "traces").exists()


def test_importing_the_package_loads_no_torch_and_no_tqdm() -> None:
    program = "import sys, accel_tracking; print([m for m in ('torch', 'tqdm', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
