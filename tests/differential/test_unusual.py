"""What is rarely seen works as in accelerate 1.15."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_loaders() -> None:
    intended = {
        "items: dispatched": "items without batches can be dispatched",
        "items: skipped": "items without batches can be skipped, too",
        "ready batches: skipped": "the same, for a dataset of batches",
        "dataclass: dispatched": "1.15 dispatches only batches of tensors in containers that it knows",
        "text: dispatched": "the same",
        "nothing: dispatched": "the same",
        "numbers: dispatched": "the same",
    }
    same("unusual", "loaders", intended=intended, least=300)


def test_optimizers_and_schedulers() -> None:
    same("unusual", "optimizers", tolerance=1e-6, least=18)


def test_arguments() -> None:
    intended = {
        "unwrap(*)": "what is no model comes back as it is",
        "clip(scalar)": "a tensor without dimensions has a gradient too",
        "find_batch_size(scalar)": "a ValueError that says so",
    }
    same("unusual", "arguments", intended=intended, least=400)
