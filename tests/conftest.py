"""Every test starts from nothing and must leave nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import pytest_randomly

from tests.support.leaks import leaked_process_group, reset_state, restore_environment

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is no fault of the code
hypothesis.settings.load_profile("any machine")
os.environ.setdefault("DS_BUILD_SHM_COMM", "0")  # or DeepSpeed compiles for a minute on a fresh machine
pytest_randomly.entrypoint_reseeds = []  # DeepSpeed offers one, which would import all of it into every run


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Reset the shared states around each test; fail one that leaves a process group open."""
    before = dict(os.environ)
    reset_state()
    yield
    reset_state()
    restore_environment(before)
    if leaked_process_group():
        import torch.distributed as dist

        dist.destroy_process_group()
        pytest.fail("the test left a process group open")


def pytest_sessionfinish() -> None:
    """Let the pooled ranks exit by themselves, so that their coverage is written."""
    from tests.support.ranks import POOL

    POOL.close(politely=True)
