"""The scenarios for one real GPU (tests/gpu), as tasks of a machine with a pretended one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_shapes.recorder import Recorder


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
        found = scenarios.losses_in("cuda", precision)
    assert found == pytest.approx(scenarios.losses_in("cpu", "no"), abs=0.08)
    return "done"


def deletion(folder: str) -> str:
    from tests.gpu import scenarios

    with Recorder():
        scenarios.deleted_while_copying("cuda", width=64)
    return "done"
