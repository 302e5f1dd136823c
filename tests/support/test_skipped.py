"""The summary of skipped tests."""

from __future__ import annotations

from tests.support.skipped import lines_of


def test_reasons_are_counted_and_told_with_what_runs_them() -> None:
    reasons = ["Skipped: needs a GPU", "Skipped: needs megatron-core", "Skipped: needs a GPU", "needs Linux"]
    assert lines_of(reasons) == [
        "    2 skipped: needs a GPU (bash tools/gpu_check.sh, on a machine with GPUs)",
        "    1 skipped: needs megatron-core (uv run tools/dev.py megatron)",
        "    1 skipped: needs Linux",
    ]


def test_a_reason_that_names_its_command_is_enough() -> None:
    (line,) = lines_of(["wandb is not installed (uv run tools/dev.py trackers has it)"])
    assert line.count("tools/dev.py trackers") == 1
