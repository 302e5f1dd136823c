"""Epochs of training from prepared loaders: the host waits for no copy of a batch that is in pinned memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.cuda_shapes.epochs import BATCH, COLLATED, SAMPLES
from tests.cuda_shapes.test_device_maps import check

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
PINNED = {"pin_memory": True}
NUM_BATCHES = SAMPLES // BATCH


def epoch(machine: GpuMachine, kind: str, options: Any, settings: Any = None, ranks: int = 0) -> dict[str, Any]:
    actual = check(
        machine.run("epochs", "epoch", kind, tuple(options.items()), tuple((settings or {}).items()), ranks)
    )
    assert actual["right"]
    assert actual["devices"] == [f"cuda:{min(max(ranks - 1, 0), 3)}"]
    return actual


@pytest.mark.parametrize("kind", [kind for kind in COLLATED if kind != "graph"])
def test_the_host_waits_for_nothing(machine: GpuMachine, kind: str) -> None:
    assert epoch(machine, kind, PINNED)["waits"] == []


@pytest.mark.parametrize("ranks", [1, 8])
def test_ranks_of_a_launch_wait_for_nothing(machine: GpuMachine, ranks: int) -> None:
    report = epoch(machine, "dict", PINNED, ranks=ranks)
    assert report["waits"] == []
    assert report["is wrapped"] == (ranks > 1)  # one rank has nobody to average gradients with


def test_a_dispatching_loader_waits_for_nothing(machine: GpuMachine) -> None:
    assert epoch(machine, "dict", PINNED, {"dispatch_batches": True})["waits"] == []


def test_the_host_waits_for_pageable_memory_unless_told_not_to(machine: GpuMachine) -> None:
    assert len(epoch(machine, "tuple", {})["waits"]) == 2 * NUM_BATCHES
    assert epoch(machine, "tuple", {}, {"non_blocking": True})["waits"] == []


def test_batches_with_a_to_of_their_own_are_copied_in_order(machine: GpuMachine) -> None:
    assert len(epoch(machine, "graph", PINNED)["waits"]) == 2 * NUM_BATCHES
    assert epoch(machine, "graph", PINNED, {"non_blocking": True})["waits"] == []


def test_a_dataset_may_reuse_its_pinned_memory(machine: GpuMachine) -> None:
    actual = check(machine.run("epochs", "reused_buffer"))
    assert actual["right"]
    assert actual["event waits"] >= SAMPLES - 1


def test_what_computes_waits_for_the_copy(machine: GpuMachine) -> None:
    """Otherwise it would read memory that is not written yet, or have it written by a later copy while it still reads."""
    assert check_list(machine.run("epochs", "order_of_streams")) == [
        "copy on the copying stream",
        "copying stream: event",
        "computing stream: waits for it",
        "computing stream: uses the memory",
        "batch",
    ]


def test_all_epochs_share_a_stream(machine: GpuMachine) -> None:
    """Torch caches memory for each stream apart."""
    assert machine.run("epochs", "streams_of_epochs") == 1


def check_list(actual: Any) -> list[str]:
    assert isinstance(actual, list), actual["error"]
    return actual


def test_one_batch_more_is_on_the_gpu(machine: GpuMachine) -> None:
    actual = check(machine.run("epochs", "memory_of_batches"))
    assert actual["peak"] <= 3.05
    assert actual["kept"] == 0
