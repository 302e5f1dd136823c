"""Variables of the environment that no other test sets: who reads them, and what comes of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from accel_cli import PrepareForLaunch, notebook
from accel_cli.launch.machine import Machine
from accel_state.devices import DEVICE_KINDS
from accel_tracking.trackers.clearml import ClearMLTracker
from accelerate import Accelerator, PartialState, notebook_launcher
from accelerate.utils import ParallelismConfig
from tests.cli.pretended import Pretended, plan_of
from tests.support.ranks import ranks

VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
PROBES = {"cuda": "PYTORCH_NVML_BASED_CUDA_CHECK", "mlu": "PYTORCH_CNDEV_BASED_MLU_CHECK"}


@pytest.mark.parametrize("kind", VISIBLE_DEVICES)
def test_chosen_devices_are_the_visible_ones(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    row = next(row for row in DEVICE_KINDS if row.name == kind)
    monkeypatch.setattr("accel_state.devices.detect_device_kind", lambda: row)
    monkeypatch.setattr(Pretended, "visible_devices_variable", Machine.visible_devices_variable)
    plan = plan_of("--num_processes", "2", "--gpu_ids", "1,3", "x.py", machine=Pretended(devices=4))
    assert plan.environment[VISIBLE_DEVICES[kind]] == "1,3"
    assert not plan.environment.keys() & (set(VISIBLE_DEVICES.values()) - {VISIBLE_DEVICES[kind]})


def test_devices_are_counted_without_being_started() -> None:
    assert {row.name: row.probe_variable for row in DEVICE_KINDS if row.probe_variable} == PROBES


def test_kaggle_gives_notebooks_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert not notebook._on_tpu()  # no notebook
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    with pytest.raises(ValueError, match="torch_xla"):
        notebook_launcher(print)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not notebook._on_tpu()


def test_processes_for_debugging_meet_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meeting"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    seen: list[Any] = []
    PrepareForLaunch(lambda: seen.append((dist.get_world_size(), os.environ["FORK_LAUNCHED"])), debug=True)(0)
    assert seen == [(1, "1")]
    assert (tmp_path / "meeting").exists()


def test_clearml_names_project_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Task:
        """Stands for the library's class."""

        current_task = staticmethod(lambda: None)

        def __init__(self) -> None:
            self.data = None

        @classmethod
        def init(cls, **names: Any) -> Task:
            made.append(names)
            return cls()

    library: Any = ModuleType("clearml")
    library.Task = Task
    monkeypatch.setitem(sys.modules, "clearml", library)
    PartialState(cpu=True)
    ClearMLTracker("mine").start()
    monkeypatch.setenv("CLEARML_PROJECT", "theirs")
    monkeypatch.setenv("CLEARML_TASK", "first")
    ClearMLTracker("mine").start()
    ClearMLTracker("mine", task_name="given").start()
    assert made == [
        {"project_name": "mine", "task_name": "mine"},
        {"project_name": "theirs", "task_name": "first"},
        {"project_name": "theirs", "task_name": "given"},
    ]


@ranks(2)
def test_context_parallelism_needs_no_permission_to_stand_alone(rank: int, world: int) -> None:
    for word in (None, "false", "true"):
        if word is not None:
            os.environ["ACCELERATE_ALLOW_CP_STANDALONE"] = word
        accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
        assert accelerator.parallelism_config.cp_enabled
        accelerator.state._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore:fsdp_plugin has no effect")
@pytest.mark.parametrize(("word", "is_on"), [("true", True), ("True", True), ("false", False), ("0", False)])
def test_words_that_switch_a_way_of_training_on(word: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", word)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.state.fsdp_plugin is not None) is is_on
