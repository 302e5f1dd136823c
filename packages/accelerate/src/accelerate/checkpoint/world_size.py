"""What cannot be restored where other ranks load a checkpoint than saved it."""

from __future__ import annotations

import os

from accel_state.warning import warn_user
from accelerate.checkpoint.late import added_by
from accelerate.checkpoint.load import Checkpoint


def warn_of_other_world_size(checkpoint: Checkpoint, num_processes: int) -> None:
    """Say what cannot be restored when the number of processes has changed."""
    saved = checkpoint.world_size
    if saved == num_processes:
        _warn_of_absent(checkpoint)
    if saved in (0, num_processes):
        return
    first, last = sorted((saved, num_processes))
    ranks = f"process {first}" if last - first == 1 else f"processes {first} to {last - 1}"
    effect = (
        f"{ranks} cannot go on with random states of an earlier run"
        if num_processes > saved
        else f"the random states of {ranks} are not used"
    )
    warn_user(
        f"The checkpoint {os.fspath(checkpoint.folder)} was saved with num_processes={saved} and is loaded with "
        f"num_processes={num_processes}: {effect}. Weights, optimizers and schedulers are complete; choose the batch size "
        "per process anew if the global one is to stay"
    )


def _warn_of_absent(checkpoint: Checkpoint) -> None:
    """Say whose random states are missing because the main process saved alone."""
    manifest = checkpoint.manifest
    absent = [rank for rank in manifest.absent if not added_by(checkpoint.folder, manifest, rank)] if manifest else []
    if absent:
        warn_user(
            f"The checkpoint {os.fspath(checkpoint.folder)} was saved by the main process alone: random choices start anew on "
            f"processes {', '.join(map(str, absent))}. Everything else is complete; call save_state on all processes to save "
            "their random states, too"
        )
