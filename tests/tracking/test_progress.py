"""The progress bar and the profiler on several processes."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm as tqdm_class

from accel_state.settings.profile import ProfileKwargs
from accel_tracking import progress
from accel_tracking.profiling import record_profile
from accel_tracking.progress import progress_bar, tqdm
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
    with pytest.raises(ImportError, match=r"pip install 'accelerate\[progress\]'"):
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


# ---- samples of all processes ---------------------------------------------------------------------------------------


@ranks(2)
def test_the_bar_counts_the_samples_of_all_processes(rank: int, world: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(21.0)), batch_size=4))
    shown = io.StringIO()
    bar = progress_bar(loader, desc="epoch", file=shown, mininterval=0)
    assert len(list(bar)) == len(bar) == 3
    if rank == 0:
        assert (bar.bar.n, bar.bar.total) == (21, 21)
        assert "samples/s" in shown.getvalue()
    else:
        assert bar.bar.disable
        assert shown.getvalue() == ""


def test_a_resumed_epoch_starts_where_it_was(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4))
    bar = progress_bar(accelerator.skip_first_batches(loader, 2), file=io.StringIO())
    assert bar.bar.initial in (0, 8)  # 8 where the loader says what it skips
    list(bar)
    assert bar.bar.n <= 20


def test_streams_are_counted_by_what_is_in_their_batches() -> None:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        yield {"x": torch.ones(3, 2)}
        yield {"x": torch.ones(2, 2)}

    bar = progress_bar(batches(), file=io.StringIO())
    assert len(list(bar)) == 2
    assert (bar.bar.n, bar.bar.total) == (5, None)
    things = progress_bar(["a", "b", "c"], file=io.StringIO())
    list(things)
    assert (things.bar.n, things.bar.total) == (3, 3)


def test_only_the_outermost_bar_stays_and_values_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    outer = progress_bar(range(2), desc="epochs", file=shown, mininterval=0)
    for _ in outer:
        inner = progress_bar([torch.ones(4)], desc="batches", samples_per_batch=4, file=shown, mininterval=0)
        for _ in inner:
            inner.show(loss=torch.tensor(0.5), phase="train")
        inner.write("done")
    assert (outer.bar.pos, outer.bar.n) == (0, 2)
    assert "loss=0.5, phase=train" in shown.getvalue()
    assert capsys.readouterr().out == "done\ndone\n"


def test_a_loop_that_is_left_early_closes_its_bar() -> None:
    bar = progress_bar(range(10), file=io.StringIO())
    for item in bar:
        if item == 3:
            break
    del item
    gc.collect()
    assert len(tqdm_class._instances) == 0


def test_a_bar_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="samples_per_batch=0"):
        progress_bar([], samples_per_batch=0)
