"""The scenarios of `test_one_gpu` where there is no GPU: on the CPU, and on a pretended GPU (see tests/cuda_shapes)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.gpu import scenarios
from tests.gpu.test_one_gpu import check_shared_device

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
    assert scenarios.calls_while_gathering("cpu")


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
    ],
    ids=str,
)
def test_on_a_pretended_gpu(machine: GpuMachine, name: str, arguments: tuple[str, ...]) -> None:
    found = machine.run("gpu_scenarios", name, *arguments)
    assert found == "done", found["error"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_figures_can_be_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from tools.bench import gpu

    assert gpu.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    for words in ("forward pass, batch 64, 50 %", "load", "added to a step", "Llama"):
        assert words in printed
