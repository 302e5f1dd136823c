"""Warns when ranks have split a data set differently: each then trains on what another one validates on."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.utils.data import Subset

from accel_state.warning import program_frame, warn_user

_times_at: Counter[str] = Counter()


def check_same_split(dataset: Any) -> None:
    """Warn if another rank prepares a `Subset` of other indices at the same line of the program.

    The first rank leaves a checksum in the store of the process group, with which the others compare theirs: nothing waits.

    Args:
        dataset: The data set of a loader; anything but a `Subset` is passed over.
    """
    if not isinstance(dataset, Subset) or not (dist.is_available() and dist.is_initialized()):
        return
    store, group = dist.distributed_c10d._get_default_store(), dist.group.WORLD
    if store is None or group is None or group.size() == 1:
        return
    try:
        checksum = str(zlib.crc32(array("q", map(int, dataset.indices)).tobytes()))
    except (TypeError, ValueError, OverflowError):  # not the indices of a sequence
        return
    frame = program_frame()
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    _times_at[line] += 1
    key, value = f"accelerate/split/{line}/{_times_at[line]}", f"{group.rank()} {checksum}"
    first, _, other = store.compare_set(key, "", value).decode().partition(" ")
    if other != checksum:
        lower, higher = sorted((int(first), group.rank()))
        warn_user(
            f"Ranks {lower} and {higher} prepare subsets of different samples, so that each may train on what the other validates on. "
            "Split with the same seed on every rank: random_split(dataset, lengths, generator=torch.Generator().manual_seed(42)), or "
            "call set_seed(42) before."
        )
