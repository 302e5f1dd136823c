"""Files that ranks add to a checkpoint which the main process has published without them.

Each is written with an atomic rename. The RNG states, which are written last, contain the token of the manifest, so that
files of an earlier checkpoint in the same folder are recognized. The manifest does not change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accel_ops.filenames import DATALOADER_NAME, RNG_STATE_NAME, WINDOW_NAME
from accel_ops.files import load
from accelerate.checkpoint.manifest import Manifest

TOKEN_KEY = "checkpoint"


def late_files(folder: Path, ranks: Collection[int]) -> list[str]:
    """Names of the files in a folder that these ranks may have added."""
    if not ranks:
        return []
    pattern = re.compile(rf"(?:{RNG_STATE_NAME}_|{WINDOW_NAME}_|{DATALOADER_NAME}(?:_\d+)?_rank)(\d+)\.(?:pkl|bin)")
    matches = [(name, pattern.fullmatch(name)) for name in sorted(os.listdir(folder))]
    return [name for name, match in matches if match and int(match[1]) in ranks]


def added_by(folder: Path, manifest: Manifest | None, rank: int) -> list[str]:
    """Names of the files that a rank has added to this very checkpoint.

    Raises:
        ValueError: The file of its RNG states is damaged.
    """
    if manifest is None or rank not in manifest.absent:
        return []
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.is_file() or path.is_symlink():
        return []
    state: Any = load(path, map_location="cpu")
    belongs = isinstance(state, dict) and state.get(TOKEN_KEY) == manifest.token
    return late_files(folder, [rank]) if belongs else []
