"""What the summary of a run says of skipped tests: one line for each reason, with the command that runs them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

COMMANDS = {
    r"\bGPUs?\b|CUDA": "bash tools/gpu_check.sh, on a machine with GPUs",
    r"bitsandbytes|torchao": "uv run tools/dev.py quantization",
    r"megatron|apex": "uv run tools/dev.py megatron",
    r"torch_xla|XLA": "uv run tools/dev.py xla",
    r"tools/dev.py trackers": "uv run tools/dev.py trackers",
    r"SLURM|machines can|cluster can|pdsh|mpirun|ompi|ssh": "uv run tools/dev.py clusters, as root on Debian",
    r"\bsite\b|chromium": "uv run tools/dev.py docs",
    r"needs torch \d|OLDEST|of torch \d": "uv run tools/dev.py matrix",
    r"\bray\b": "uv run tools/dev.py ray",
    r"torchft": "uv run tools/dev.py torchft",
}
"""What a reason mentions, and what runs such tests."""


def lines_of(reasons: Iterable[str]) -> list[str]:
    """A line for each reason, the most frequent ones first.

    Args:
        reasons: Of each skipped test, as pytest says it.
    """
    counts = Counter(reason.removeprefix("Skipped: ").strip() for reason in reasons)
    return [f"{count:5} skipped: {reason}{_command(reason)}" for reason, count in counts.most_common()]


def _command(reason: str) -> str:
    commands = (
        command for mentioned, command in COMMANDS.items() if re.search(mentioned, reason) and command not in reason
    )
    return next((f" ({command})" for command in commands), "")
