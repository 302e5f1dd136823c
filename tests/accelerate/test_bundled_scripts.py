"""The programs in `accelerate.test_utils.scripts`: each runs through `accelerate launch`, and fails when it should."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.enums import DistributedType
from accelerate import Accelerator
from accelerate.test_utils import examples, path_in_accelerate_package, scripts
from accelerate.test_utils.scripts import external_deps, test_ddp_comm_hook, test_merge_weights, test_notebook
from accelerate.test_utils.scripts.checks.check import Process, SkippedError
from accelerate.test_utils.scripts.checks.sentences import Sentences, accuracy, make_loaders, make_reader
from accelerate.test_utils.scripts.external_deps import (
    needs,
    test_checkpointing,
    test_metrics,
    test_peak_memory_usage,
    test_performance,
    test_pippy,
)
from tests.support.ranks import ranks

HERE = Path(__file__).parent
ALONE = Process(0, 1, DistributedType.NO)
ON_ONE_MACHINE = [
    "external_deps.test_checkpointing", "external_deps.test_ds_alst_ulysses_sp", "external_deps.test_ds_multiple_model",
    "external_deps.test_metrics", "external_deps.test_peak_memory_usage", "external_deps.test_performance",
    "external_deps.test_pippy", "external_deps.test_zero3_integration", "test_cli", "test_ddp_comm_hook",
    "test_distributed_data_loop", "test_merge_weights", "test_notebook", "test_ops", "test_script", "test_sync",
]  # fmt: skip


def launch(folder: Path, script: Path, *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script on two CPU processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--main_process_port", "0", *options, str(script), *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=400)


def run_all(folder: Path, *programs: str, options: Sequence[str] = ()) -> tuple[list[Any], str]:
    """Run bundled scripts in one launch: how each ended, and what they printed."""
    (folder / "programs").write_text("\n".join(programs))
    done = launch(folder, HERE / "scripts_in_one_launch.py", str(folder / "programs"), options=options)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert ended, done.stdout + done.stderr
    return json.loads(ended[0].removeprefix("ENDED ")), done.stdout + done.stderr


def test_all_programs_are_there() -> None:
    actual = {
        row.name.removeprefix(f"{scripts.__name__}.")
        for package in (scripts, external_deps)
        for row in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        if row.name.rpartition(".")[2].startswith("test_")
    }
    assert actual == set(ON_ONE_MACHINE)
    for name in ON_ONE_MACHINE:
        assert callable(importlib.import_module(f"{scripts.__name__}.{name}").main)


@pytest.mark.thorough
@pytest.mark.launch
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_programs_for_replicas(tmp_path: Path) -> None:
    ended, said = run_all(
        tmp_path,
        "test_cli.py",
        "external_deps/test_performance.py --performance_lower_bound 0.9 --output_dir performance --num_epochs 1",
        "external_deps/test_checkpointing.py --output_dir runs --partial_train_epoch 1",
        "external_deps/test_checkpointing.py --output_dir runs --resume_from_checkpoint runs/epoch_0",
        "external_deps/test_peak_memory_usage.py --peak_memory_upper_bound 20000 --output_dir memory --n_train 64",
        "external_deps/test_metrics.py",
        "external_deps/test_pippy.py",
        "test_ddp_comm_hook.py",
        "test_merge_weights.py",
    )
    assert ended == [0] * 9, said
    assert "Process 1 of 2 runs on cpu." in said
    assert json.loads((tmp_path / "performance" / "all_results.json").read_text())["accuracy"] >= 0.9
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "epoch_0", "state_0.json", "epoch_1", "state_1.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "memory" / "peak_memory_utilization.json").read_text())["epoch-0"] > 0
    for module, count in ((test_metrics.METRICS, 0), (test_pippy.PIPELINES, 0), (test_ddp_comm_hook.COMMUNICATION, 0)):
        assert f"{len(module)} ok, 0 failed, {count} skipped" in said
    assert f"0 ok, 0 failed, {len(test_merge_weights.MERGING)} skipped" in said  # which needs FSDP


@pytest.mark.thorough
@pytest.mark.launch
def test_programs_for_sharded_models(tmp_path: Path) -> None:
    options = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_state_dict_type", "SHARDED_STATE_DICT"]
    ended, said = run_all(
        tmp_path,
        "test_merge_weights.py",
        "external_deps/test_performance.py --performance_lower_bound 0.9 --num_epochs 1",
        "external_deps/test_checkpointing.py --partial_train_epoch 1",
        "external_deps/test_checkpointing.py --resume_from_checkpoint epoch_0 --num_epochs 1",
        options=options,
    )
    assert ended == [0] * 4, said
    assert f"{len(test_merge_weights.MERGING)} ok, 0 failed, 0 skipped" in said


@pytest.mark.thorough
@pytest.mark.launch
def test_programs_for_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    done = launch(tmp_path, HERE / "deepspeed_in_one_launch.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 ok, 0 failed, 0 skipped" in done.stdout


@pytest.mark.launch
@pytest.mark.takes_turns("ways to start")
def test_programs_that_launch_themselves(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_NUM_PROCESSES": "2", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(path_in_accelerate_package("test_utils", "scripts", "test_notebook.py"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(test_notebook.CHECKS)} ok, 0 failed, 0 skipped" in done.stdout


# ---- what they say when something is wrong ------------------------------------------------------------------------


def test_too_little_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    args = test_performance.parse(["--performance_lower_bound", "0.9", "--output_dir", str(tmp_path)])
    config = {"lr": 0.0, "num_epochs": 1, "seed": 1, "batch_size": 64}
    with pytest.raises(AssertionError, match=r"best accuracy is 0\.\d+, but must be at least 0\.9"):
        test_performance.training_function(config, args)
    assert json.loads((tmp_path / "all_results.json").read_text())["accuracy"] < 0.9


def test_too_much_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = ["--peak_memory_upper_bound", "1", "--n_train", "16", "--n_val", "16", "--output_dir", str(tmp_path)]
    config = {"lr": 0.1, "num_epochs": 1, "seed": 1, "batch_size": 16}
    with pytest.raises(AssertionError, match=r"epoch-0 needed \d+ MB, but may need at most 1.0 MB"):
        test_peak_memory_usage.training_function(config, test_peak_memory_usage.parse(words))


def test_a_resumed_run_that_has_learnt_something_else(tmp_path: Path) -> None:
    test_checkpointing_state = tmp_path / "state_0.json"
    test_checkpointing_state.write_text(json.dumps({"epoch": 0, "accuracy": 0.5}))
    with pytest.raises(AssertionError, match=r"accuracy after epoch 0 was 0.5, and is 0.75 after loading"):
        test_checkpointing.compare({"epoch": 0, "accuracy": 0.75}, str(test_checkpointing_state))
    with pytest.raises(ValueError, match="give a folder called epoch_<number>"):
        test_checkpointing.epoch_of("somewhere")


def test_checks_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SkippedError, match="launch with --use_fsdp"):
        test_merge_weights.trained_and_saved(ALONE)
    with pytest.raises(SkippedError, match="several processes"):
        test_pippy.chain(ALONE)
    monkeypatch.setattr(needs, "is_deepspeed_available", lambda: False)
    with pytest.raises(SkippedError, match="pip install deepspeed"):
        needs.need_deepspeed(ALONE)


@ranks(2)
def test_wrong_predictions_are_found(rank: int, world: int) -> None:
    process = Process(rank, world, DistributedType.MULTI_CPU)
    test_metrics.correct(process)

    class Halved(Sentences):
        def __init__(self, count: int, seed: int) -> None:
            super().__init__(count // 2 if count == 99 else count, seed)

    test_metrics.Sentences = Halved  # type: ignore[misc]
    try:
        with pytest.raises(AssertionError, match="number of predictions"):
            test_metrics.each_once(process, dispatch_batches=False, split_batches=False, surplus=99 - 48 * world)
    finally:
        test_metrics.Sentences = Sentences  # type: ignore[misc]


def test_the_task_is_decided_by_one_word() -> None:
    sentences = Sentences(10, seed=0)
    assert [bool((words == 7).any()) for words in sentences.words] == [bool(label) for label in sentences.labels]
    accelerator = Accelerator(cpu=True)
    model, _, checking = accelerator.prepare(make_reader(), *make_loaders())
    assert 0.2 < accuracy(accelerator, model, checking) < 0.8
    wanted = make_reader().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


# ---- example programs ---------------------------------------------------------------------------------------------

COMPLETE = """
def training_function(config, args):
    # a remark
    accelerator = Accelerator()

    train(accelerator)
    save(accelerator)

def main():
    parser.add_argument("--save")
"""
FEATURE = """
def training_function(config, args):
    accelerator = Accelerator()
    train(accelerator)
    log(accelerator)
    special()

def main():
    parser.add_argument("--log")
"""


def test_lines_of_a_feature_that_the_complete_example_lacks(tmp_path: Path) -> None:
    complete, feature, other = (tmp_path / name for name in ("complete.py", "feature.py", "other.py"))
    complete.write_text(COMPLETE)
    feature.write_text(FEATURE)
    other.write_text("def training_function(config, args):\n    special()\n")
    assert examples.compare_against_test(complete, feature, False) == ["    log(accelerator)\n", "    special()\n"]
    assert examples.compare_against_test(complete, feature, False, other) == ["    log(accelerator)\n"]
    assert examples.compare_against_test(complete, feature, True) == ['    parser.add_argument("--log")\n']
    lines = examples.get_function_contents_by_name(COMPLETE.splitlines(), "training_function")
    assert lines[0].startswith("def training_function")
    assert lines[-2].strip() == "save(accelerator)"
    assert len(examples.clean_lines(lines)) == 4
    assert examples.get_function_contents_by_name([], "main") == []
    with pytest.raises(ValueError, match="name='train' is not a function of an example"):
        examples.get_function_contents_by_name([], "train")


def test_arguments_of_programs() -> None:
    assert test_performance.parse([]) == Namespace(
        model_name_or_path=None, output_dir=".", performance_lower_bound=None, num_epochs=3, add_pad_token=False,
        tp_plan=None, tp_size=None, model_dtype=None,
    )  # fmt: skip
