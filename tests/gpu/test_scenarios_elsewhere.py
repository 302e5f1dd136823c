"""The scenarios of `test_one_gpu` where there is no GPU: on the CPU, and on a pretended GPU (see tests/cuda_shapes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.gpu import scenarios
from tests.gpu.test_one_gpu import check_shared_device
from tools.bench import gpu, gpu_worker
from tools.bench.gpu_measure import Figure, Scale, by_turns

needs_pretended_gpu = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def machine() -> Iterator[GpuMachine]:
    machine = GpuMachine()
    yield machine
    machine.close()


def test_collectives_of_one_rank() -> None:
    scenarios.collectives_of_one_rank("cpu")


@pytest.mark.takes_turns
@pytest.mark.parametrize("engine", scenarios.ENGINES)
def test_states_are_saved_and_loaded(engine: str, tmp_path: Path) -> None:
    scenarios.saves_and_loads("cpu", engine, tmp_path)


def test_precisions() -> None:
    plain = scenarios.losses_in("cpu", "no")
    assert plain[-1] < plain[0]
    assert scenarios.losses_in("cpu", "bf16") == pytest.approx(plain, abs=0.08)


@pytest.mark.thorough
def test_two_processes_share_a_device(tmp_path: Path) -> None:
    check_shared_device("cpu", tmp_path)


@pytest.mark.takes_turns
def test_deletion() -> None:
    scenarios.deleted_while_copying("cpu", width=64)


def test_a_profiler_sees_the_gathers() -> None:
    calls = scenarios.calls_while_gathering("cpu")
    assert any("allgather" in name.replace("_", "") for name in calls)


def test_what_comes_after_the_measured_time_is_not_counted() -> None:
    x = torch.ones(2)
    with torch.profiler.profile() as profile:
        x.add(1)
        with torch.profiler.record_function("measured"):
            x.mul(2)
        x.sum().item()
    names = scenarios.names_within(profile.events(), "measured")
    assert "aten::mul" in names
    assert not {"aten::add", "aten::sum", "aten::item", "aten::_local_scalar_dense"} & set(names)


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_states_are_saved_in_the_background(engine: str, tmp_path: Path) -> None:
    scenarios.saves_in_the_background("cpu", engine, tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.filterwarnings("ignore")  # of DeepSpeed
def test_zero_3_with_offload(tmp_path: Path) -> None:
    scenarios.in_own_process(scenarios.zero3_with_offload, "cpu", tmp_path)


@pytest.mark.takes_turns
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("form", scenarios.FORMS)
def test_an_epoch(form: str) -> None:
    if form == "BatchEncodings":
        pytest.importorskip("transformers")
    scenarios.epochs_without_waiting("cpu", form)


def test_a_batch_size_is_found() -> None:
    assert scenarios.batch_sizes_until_one_fits("cpu") == [64, 57, 51, 45]


@pytest.mark.takes_turns
@needs_pretended_gpu
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("collectives", ()),
        *[("saves", (engine,)) for engine in scenarios.ENGINES],
        *[("losses", (precision,)) for precision in ("no", "bf16", "fp16")],
        ("deletion", ()),
        *[("background_saves", (engine,)) for engine in ("single", "fsdp2")],
        *[("epochs", (form,)) for form in scenarios.FORMS],
        ("batch_sizes", ()),
    ],
    ids=str,
)
def test_on_a_pretended_gpu(machine: GpuMachine, name: str, arguments: tuple[str, ...]) -> None:
    actual = machine.run("gpu_scenarios", name, *arguments)
    assert actual == "done", actual["error"]


@pytest.mark.thorough
def test_the_figures_can_be_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "figures.md"
    assert gpu.main(["--tiny", "--output", str(output), "--seconds", "600"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "forward pass, batch 64, 50 %", "load 0.0 GB", "added to a step", "by hand against itself", "step of a Llama",
        "peak memory of a bf16 step", "in a group of one rank", "left after `free_memory`", "waits for the GPU in 10",
        "batches/s of a pinned loader", "`save_state`", "`load_state`", "async_save=True", "tokens/s", "FSDP 2 on one rank",
        "not installed", "GB/s from pinned memory",
    ):  # fmt: skip
        assert words in printed
    assert "what is missing of it" not in printed
    assert output.read_text() == printed


def test_what_could_not_be_measured_has_a_row_that_says_why() -> None:
    taken = Figure("peak", "peak memory", "MB", 3.0, 2.0, 1.5, 1.0)
    ours = gpu.Measured({"memory": {"peak": taken}}, {"llama": "needs transformers"})
    reference = gpu.Measured({}, {"memory": "the process ended with 1; the limit is 45 s"})
    memory, llama = gpu.rows(ours, reference)
    assert memory.cells()[1:4] == ["the process ended with 1; the limit is 45 s", "2 MB", "3 MB"]
    assert not memory.met
    assert llama.cells() == ["llama, what is missing of it", "-", "-", "needs transformers", "-", "-", "not measured"]
    assert not llama.met


def test_a_part_that_raises_an_error_is_reported_and_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(scale: Scale) -> Iterator[Figure]:
        yield Figure("half", "half of it", "s", 1.0, None, 1.0, 1.0)
        raise ValueError("no room | at all")

    monkeypatch.setitem(gpu_worker.PARTS, "step", gpu_worker.Part(broken, 60))
    gpu_worker.take("step", Scale("cpu", tiny=True))
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(gpu_worker.MARK)]
    messages = [json.loads(line.removeprefix(gpu_worker.MARK)) for line in lines]
    assert [next(iter(message)) for message in messages] == ["begins", "figure", "failed", "ends"]
    assert messages[2]["failed"] == "ValueError: no room / at all"


def test_what_runs_first_changes_from_round_to_round() -> None:
    order: list[str] = []
    sides = {"raw": lambda: order.append("raw"), "prepared": lambda: order.append("prepared")}
    times = by_turns(Scale("cpu", tiny=True), sides, steps=1, rounds=4, warm_up=0)
    assert order == ["raw", "prepared", "prepared", "raw"] * 2
    assert {name: len(seconds) for name, seconds in times.items()} == {"raw": 4, "prepared": 4}


@needs_pretended_gpu
@pytest.mark.takes_turns
@pytest.mark.sample(2)
@pytest.mark.parametrize("part", gpu_worker.PARTS)
def test_the_figures_can_be_taken_on_a_pretended_gpu(machine: GpuMachine, part: str) -> None:
    figures = machine.run("gpu_scenarios", "figures", part)
    assert "error" not in figures, figures["error"]
    if part.startswith("memory"):  # bytes are the same on any GPU
        (peak, by_hand), *rehearsals, (left, _) = figures.values()
        assert all(rehearsed == pytest.approx(measured, rel=0.05) for rehearsed, measured in rehearsals)
        assert peak <= 1.005 * by_hand
        assert left == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: run it")
def test_the_check_of_a_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    script = Path(gpu.__file__).parents[1] / "gpu_check.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "no GPU that torch can use" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / ".gitignore").read_text() == "*\n"
