"""Launchers for programs: what they refuse, and what the processes find."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import accel_state.devices
from accel_cli import PrepareForLaunch, debug_launcher, notebook, notebook_launcher
from accel_state.enums import DistributedType
from accel_state.processes import PartialState
from tests.cli.running import python

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "MIXED_PRECISION")


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "NPROC", "NODE_RANK", "TPU_NAME", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the elastic agent is asked for; nothing is started."""
    from torch.distributed.launcher import api

    seen: list[Any] = []

    def elastic_launch(config: Any, function: Any) -> Callable[..., None]:
        return lambda *args: seen.append((config, function, args, dict(os.environ)))

    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    return seen


def cuda(monkeypatch: pytest.MonkeyPatch, *, used: bool = False) -> None:
    """Pretend to have CUDA devices."""
    kind = SimpleNamespace(name="cuda", module=lambda: SimpleNamespace(is_initialized=lambda: used))
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: kind)
    monkeypatch.setattr(notebook, "network_variables", lambda: {"NCCL_P2P_DISABLE": "1"})
    monkeypatch.setattr(notebook, "are_libraries_initialized", lambda *names: [])  # other tests may have used some


def test_a_prepared_function_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    launch = PrepareForLaunch(lambda *args: seen.append((args, variables())), distributed_type="MULTI_GPU")
    assert launch.distributed_type == DistributedType.MULTI_GPU
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("NODE_RANK", "1")
    launch(2, "a", "b")
    assert seen == [(("a", "b"), {"RANK": "6", "LOCAL_RANK": "2", "FORK_LAUNCHED": "1"})]


def test_one_process_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    for count in (0, 1):
        notebook_launcher(lambda *args: seen.append((args, variables())), ("a",), num_processes=count)
    notebook_launcher(lambda: seen.append(variables()), num_processes=1, mixed_precision="bf16")
    assert seen == [(("a",), {}), (("a",), {}), {"ACCELERATE_MIXED_PRECISION": "bf16"}]
    assert "on the CPU" in capsys.readouterr().out
    assert variables() == {}


def test_colab_needs_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    seen: list[int] = []
    notebook_launcher(seen.append, (1,))
    assert seen == [1]


def test_tpu_notebooks_start_a_process_on_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setenv("TPU_NAME", "local")
    with pytest.raises(ValueError, match="torch_xla"):
        notebook_launcher(print)
    calls: list[Any] = []
    library: Any = ModuleType("torch_xla.distributed.xla_multiprocessing")  # stands for what only TPU machines have
    library.spawn = lambda function, **how: calls.append((function.launcher, function.distributed_type.name, how))
    for name in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    notebook_launcher(print, (1,), num_processes=8)
    notebook_launcher(print, num_processes=1, mixed_precision="bf16")
    assert calls == [
        (print, "XLA", {"args": (1,), "nprocs": None, "start_method": "fork"}),
        (print, "XLA", {"args": (), "nprocs": 1, "start_method": "fork"}),
    ]


def test_apples_get_their_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: SimpleNamespace(name="mps"))
    notebook_launcher(lambda: None, num_processes=1)
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"


def test_several_processes(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "is_free", lambda port: True)
    notebook_launcher(print, ("a",), num_processes=2, mixed_precision="fp16")
    ((config, function, args, environ),) = started
    assert (function.__wrapped__, args) == (print, ("a",))
    assert (config.nproc_per_node, config.min_nodes, config.start_method) == (2, 1, "fork")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "127.0.0.1:29500")
    assert config.rdzv_configs["rank"] == 0
    wanted = {"WORLD_SIZE": "2", "NPROC": "2", "NODE_RANK": "0", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    wanted |= {"ACCELERATE_MIXED_PRECISION": "fp16", "MIXED_PRECISION": "fp16"}
    assert wanted.items() <= environ.items()
    assert variables() == {}
    notebook_launcher(print, ("a",), num_processes=2, max_restarts=2)
    config, _, _, environ = started[1]
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_restarts) == ("c10d", "localhost:0", 2)
    assert (environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], config.local_addr) == ("1", "localhost")


def test_several_machines_with_accelerators(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch)
    notebook_launcher(
        print, num_processes=4, num_nodes=2, node_rank=1, rdzv_backend="c10d", rdzv_endpoint="a:1", use_port="7",
        rdzv_conf={"timeout": 3},
    )  # fmt: skip
    ((config, _, _, environ),) = started
    assert (config.max_nodes, config.rdzv_endpoint, config.rdzv_configs) == (2, "a:1", {"timeout": 3})
    assert {"WORLD_SIZE": "8", "NODE_RANK": "1", "NCCL_P2P_DISABLE": "1"}.items() <= environ.items()
    assert "ACCELERATE_USE_CPU" not in environ


def test_the_usual_port_is_only_a_suggestion(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "is_free", lambda port: False)
    for port, is_kept in {"29500": False, "0": False, "1234": True}.items():
        notebook_launcher(print, num_processes=2, use_port=port)
        assert (started[-1][3]["MASTER_PORT"] == port) is is_kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "needs num_processes"),
        ({"num_processes": -1}, "must not be negative, got -1"),
        (
            {"num_processes": 2, "mixed_precision": "half"},
            "mixed_precision must be one of .* got 'half'. Did you mean 'fp16'",
        ),
        ({"num_processes": 2, "num_nodes": 2, "node_rank": 2}, "node_rank must be between 0 and 1 .* got 2"),
    ],
)
def test_wrong_arguments(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        notebook_launcher(print, **words)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        debug_launcher(print, num_processes=0)


def test_what_does_not_survive_a_fork(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, used=True)
    with pytest.raises(RuntimeError, match="cuda was used"):
        notebook_launcher(print, num_processes=2)
    monkeypatch.setattr(notebook, "are_libraries_initialized", lambda *names: ["bitsandbytes"])
    with pytest.raises(RuntimeError, match="bitsandbytes was imported"):
        notebook_launcher(print, num_processes=2)
    PartialState()
    with pytest.raises(ValueError, match="PartialState exists in this process already"):
        notebook_launcher(print, num_processes=2)
    assert started == []
    notebook.test_launch()


@pytest.mark.parametrize(("word", "is_on"), [("yes", True), ("1", True), ("true", True), ("no", False)])
def test_debug_mode_tries_processes_first(
    word: str, is_on: bool, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", word)
    notebook_launcher(print, ("a",), num_processes=2)
    tried = [(function.__wrapped__, args) for _, function, args, _ in started]
    assert tried == [*([(notebook.test_launch, ())] if is_on else []), (print, ("a",))]


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    def elastic_launch(config: Any, function: Any) -> Any:
        def fail(*args: Any) -> None:
            raise ChildFailedError("trial", {1: ProcessFailure(1, 12, -9, "")})

        return fail

    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "yes")
    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    with pytest.raises(
        RuntimeError, match="the trial run .* failed before the function was called.*rank 1 was killed by SIGKILL"
    ):
        notebook_launcher(print, num_processes=2)


PROGRAM = """
import os
import sys
import time
from pathlib import Path
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate import Accelerator, debug_launcher, notebook_launcher
from accelerate.state import PartialState

factor = 10  # a closure: the processes are forked

def cell(name):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    total = accelerator.reduce(torch.tensor(factor * (accelerator.process_index + 1)))
    Path(sys.argv[1], f"{name}{accelerator.process_index}").write_text(f"{total.item()} {accelerator.mixed_precision}")

def broken():
    state = PartialState()
    if state.process_index == 1:
        raise KeyError("in the second")
    state.wait_for_everyone()  # whose error follows from the other one

def broken_beside_one_that_catches():
    if os.environ["RANK"] == "1":
        raise KeyError("in the second")
    try:
        time.sleep(100)
    except Exception:  # a termination is none
        Path(sys.argv[1], "caught").touch()

debug_launcher(cell, ("debug",))
notebook_launcher(cell, ("notebook",), num_processes=2, mixed_precision="bf16", use_port="0")
for launcher, function in (
    (debug_launcher, broken), (notebook_launcher, broken), (notebook_launcher, broken_beside_one_that_catches)
):
    try:
        launcher(function, num_processes=2)
    except Exception as error:
        assert "in the second" in str(error) and "Traceback" in str(error), error
        if launcher is notebook_launcher:
            assert isinstance(error, ChildFailedError) and error.__suppress_context__
            assert str(error).startswith("rank 1 failed, and the other processes were terminated."), error
            assert len(str(error).splitlines()) == 5 + (sys.version_info >= (3, 13)), error  # which shows lines of -c
    else:
        raise AssertionError(launcher)
"""


@pytest.mark.launch
@pytest.mark.takes_turns("ways to start")
def test_functions_really_run_together(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, str(tmp_path), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "torch/distributed/elastic" not in done.stderr, "nothing of the agent's log"
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"debug0": "30 no", "debug1": "30 no", "notebook0": "30 bf16", "notebook1": "30 bf16"}
