"""By which names of files a checkpoint shows the way of training that it was saved under."""

from __future__ import annotations

import re
from collections.abc import Collection

from accel_ops.filenames import MODEL_NAME

ENGINE_STATES = re.compile(rf"{MODEL_NAME}(?:_\d+)?/.*_states\.pt")


def holds_engines(names: Collection[str]) -> bool:
    """Whether there are states of DeepSpeed among the files of a checkpoint, named relative to it."""
    return any(ENGINE_STATES.fullmatch(name) for name in names)
