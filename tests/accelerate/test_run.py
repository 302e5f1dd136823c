"""What surrounds the training loop: printing, processes taking turns, tracking, profiles, saving, the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops.files.serialization import load
from accel_state.settings.profile import ProfileKwargs
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.tracking.memory_tracker import MemoryTracker


@ranks(2)
def test_decorators_run_on_their_process_only(rank: int, world: int) -> None:
    accelerator = Accelerator()

    def who() -> int:
        return accelerator.process_index

    expected = {
        accelerator.on_main_process(who): 0,
        accelerator.on_main_process()(who): 0,
        accelerator.on_local_main_process(who): 0,
        accelerator.on_last_process(who): 1,
        accelerator.on_process(who, process_index=1): 1,
        accelerator.on_process(process_index=0)(who): 0,
        accelerator.on_local_process(who, local_process_index=1): 1,
        accelerator.on_local_process(local_process_index=0)(who): 0,
    }
    for decorated, runs_on in expected.items():
        assert decorated() == (rank if rank == runs_on else None)


@ranks(2)
def test_the_main_process_goes_first(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator()
    for number, block in enumerate((accelerator.main_process_first, accelerator.local_main_process_first)):
        with block():
            if rank == 1:
                assert (tmp_path / str(number)).exists()
            else:
                (tmp_path / str(number)).touch()


@ranks(2)
def test_inputs_are_split(rank: int, world: int) -> None:
    accelerator = Accelerator()
    with accelerator.split_between_processes(["a", "b", "c"]) as mine:
        assert mine == [["a", "b"], ["c"]][rank]
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as mine:
        assert mine == [["a", "b"], ["c", "c"]][rank]


@ranks(2)
def test_printing_once(rank: int, world: int) -> None:
    import contextlib
    import io

    accelerator = Accelerator()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        accelerator.print("hello", "you", sep="-")
    assert shown.getvalue() == ("hello-you\n" if rank == 0 else "")
    accelerator.wait_for_everyone()


def test_tracking_a_run() -> None:
    tracker = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    assert accelerator.log_with == [tracker]
    with pytest.warns(UserWarning, match="log.. was called before init_trackers"):
        accelerator.log({"ignored": 1})
    accelerator.init_trackers("digits", config={"rate": 0.1}, init_kwargs={"memory": {}})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("memory") is tracker
    assert accelerator.get_tracker("memory", unwrap=True) is tracker.calls
    accelerator.log({"loss": 0.5}, step=1, log_kwargs={"memory": {"commit": True}})
    accelerator.end_training()
    assert tracker.calls == ["start", ("config", {"rate": 0.1}), ({"loss": 0.5}, 1, {"commit": True}), "finish"]


def test_an_unknown_service_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="tensorbord.*tensorboard"):
        Accelerator(cpu=True, log_with="tensorbord", project_dir="runs")


@ranks(2)
def test_the_end_of_training_ends_the_process_group(rank: int, world: int) -> None:
    tracker = MemoryTracker()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("digits")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.end_training()
    assert not dist.is_initialized()
    assert tracker.calls == (["start", "finish"] if rank == 0 else [])
    # the pool waits in a group at the end of every test
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@ranks(2)
def test_profiles_go_where_the_handler_says(rank: int, world: int, tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    accelerator = Accelerator(kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(2).add(1)
    assert profiler.key_averages()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]
    with accelerator.profile(ProfileKwargs(activities=["cpu"])):
        pass
    assert len(list(tmp_path.iterdir())) == 2


@ranks(2)
def test_objects_are_saved_once(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save({"rank": rank}, tmp_path / "object.bin")
    accelerator.save({"weight": torch.full((2,), rank)}, tmp_path / "tensors.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    assert load(tmp_path / "object.bin") == {"rank": 0}
    assert (tmp_path / "tensors.safetensors").exists()


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_only_what_has_a_state_can_be_registered() -> None:
    accelerator = Accelerator(cpu=True)
    counter = Counter()
    with pytest.raises(
        ValueError, match=r"got objects that it cannot save: Item at index 1, 3 \(int\); Item at index 2, tensor"
    ):
        accelerator.register_for_checkpointing(counter, 3, torch.ones(1))
    assert accelerator._custom_objects == []
    accelerator.register_for_checkpointing(counter)
    assert accelerator._custom_objects == [counter]


def test_checkpoints_are_left_to_their_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Keeper:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    accelerator = Accelerator(cpu=True)
    accelerator._checkpoints = Keeper()  # type: ignore[assignment]
    accelerator.save_state("out", False, exclude=1)
    accelerator.load_state("out", {"a": 1}, include=2)
    accelerator.register_save_state_pre_hook(print)
    accelerator.register_load_state_pre_hook(print)
    assert calls == [
        ("save_state", ("out", False), {"async_save": False, "exclude": 1}),
        ("load_state", ("out", {"a": 1}), {"include": 2}),
        ("register_save_state_pre_hook", (print,), {}),
        ("register_load_state_pre_hook", (print,), {}),
    ]
