"""One machine with pretended GPUs for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda_shapes.driver import GpuMachine


@pytest.fixture(scope="session")
def machine() -> Iterator[GpuMachine]:
    """Started by the first test that needs it."""
    machine = GpuMachine()
    yield machine
    machine.close()
