"""The scenarios for one real GPU (tests/gpu), as tasks of a machine with a pretended one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_shapes.recorder import Recorder, Report


def collectives(folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        scenarios.collectives_of_one_rank("cuda")
    return "done"


def saves(engine: str, folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        scenarios.saves_and_loads("cuda", engine, Path(folder))
    return "done"


def losses(precision: str, folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        actual = scenarios.losses_in("cuda", precision)
    assert actual == pytest.approx(scenarios.losses_in("cpu", "no"), abs=0.08)
    return "done"


def deletion(folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        scenarios.deleted_while_copying("cuda", width=64)
    return "done"


def background_saves(engine: str, folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        scenarios.saves_in_the_background("cuda", engine, Path(folder))
    return "done"


def epochs(form: str, folder: str) -> str:
    """Here the recorder tells where the host waits: torch's debug mode does not see copies on a pretended GPU."""
    from tests.gpu import scenarios

    with Recorder() as recorder:
        report = Report()
        scenarios.epochs_without_waiting("cuda", form, lambda _: recorder.recording(report))
    assert report.waits == [], "\n".join(report.waits)
    return "done"


def batch_sizes(folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        assert scenarios.batch_sizes_until_one_fits("cuda") == [64, 57, 51, 45]
    return "done"


def figures(part: str, folder: str) -> dict[str, list[float | None]]:
    """Figures of tools/bench/gpu.py and their floors, of models so small that those in seconds mean nothing."""
    from contextlib import nullcontext

    from tests.gpu.scenarios import group_of_one
    from tools.bench.gpu_measure import Scale
    from tools.bench.gpu_worker import PARTS

    with Recorder(), group_of_one() if PARTS[part].has_group else nullcontext():
        taken = list(PARTS[part].measure(Scale("cuda", tiny=True)))
    return {figure.key: [figure.value, figure.floor] for figure in taken}
