"""A program that says where it runs, to see that a launch gets through."""

from __future__ import annotations

import sys

from accelerate import PartialState


def main() -> int:
    """Say where this process runs, and return 0."""
    state = PartialState()
    sys.stdout.write(f"Process {state.process_index} of {state.num_processes} runs on {state.device}.\n")
    state.wait_for_everyone()
    state.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
