"""Checkpoints without a manifest: those of accelerate 1.15, and folders that are something else."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from pathlib import Path

from accel_integrations.checkpoints.sharded_states import DEEPSPEED_STATES
from accel_ops.filenames import CUSTOM_OBJECT_NAME, FSDP_MODEL_NAME, MODEL_NAME, RNG_STATE_NAME, SCALER_NAME

TRAINING_FILES = re.compile(
    r"(?:model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.(?:safetensors|bin)"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{CUSTOM_OBJECT_NAME}_\d+\.pkl|{re.escape(SCALER_NAME)}"
)
SHARDED = re.compile(rf"{FSDP_MODEL_NAME}(?:_\d+)?(?:_rank\d+)?(?:\.bin)?")
OTHER_ENGINES = {
    "FSDP": re.compile(rf"{FSDP_MODEL_NAME}.*|.*\.distcp"),
    "DeepSpeed": re.compile(r"zero_to_fp32\.py|zero_pp_rank_.*"),
    "Megatron-LM": re.compile(r"latest_checkpointed_iteration\.txt"),
}

READABLE = ("FSDP", "DeepSpeed")
"""Engines whose sharded checkpoints can be read."""


def list_legacy_files(folder: Path, *, with_sharded: bool = False) -> list[str]:
    """The files of a checkpoint that has no manifest, checked for truncation.

    Args:
        folder: Where they are.
        with_sharded: Whether to list sharded states, too, by the names of their folders.

    Raises:
        ValueError: The folder is no checkpoint, is one of another engine, or holds a file that is not complete.
    """
    present = sorted(entry.name for entry in os.scandir(folder))
    for engine, pattern in OTHER_ENGINES.items():
        if with_sharded and engine in READABLE:
            continue
        if alien := next((name for name in present if pattern.fullmatch(name)), None):
            raise ValueError(
                f"{folder} is a checkpoint of {engine}, as {alien!r} shows, and this run does not use {engine}. Load it with "
                "the settings with which it was saved."
            )
    names = [name for name in present if TRAINING_FILES.fullmatch(name)]
    if not names:
        shown = ", ".join(map(repr, present[:5])) or "nothing"
        raise ValueError(
            f"{folder} is not a checkpoint: it holds {shown} instead of a manifest.json or files like model.safetensors and "
            "random_states_0.pkl. Pass the folder that save_state() returned."
        )
    sharded = [name for name in present if with_sharded and SHARDED.fullmatch(name)]
    if with_sharded:
        inner = (path.relative_to(folder).as_posix() for path in folder.glob(f"{MODEL_NAME}*/*.pt"))
        sharded += sorted(name for name in inner if DEEPSPEED_STATES.fullmatch(name))
    for name in names:
        if problem := _find_truncation(folder / name):
            raise ValueError(f"The checkpoint {folder} is not complete: {name!r} {problem}. Load another checkpoint.")
    return names + sharded


def _find_truncation(path: Path) -> str | None:
    """How a file is truncated, read from its first and last bytes alone; None where it seems complete."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return None if zipfile.is_zipfile(path) or _is_old_pickle(path) else f"is truncated at {size} bytes"
    with open(path, "rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        ends = [
            int(end) for end in re.findall(rb'"data_offsets":\s*\[\d+,\s*(\d+)\]', file.read(min(header_bytes, size)))
        ]
    expected = 8 + header_bytes + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, its header says {expected}"


def _is_old_pickle(path: Path) -> bool:
    """True for the format of torch before 1.6, whose length cannot be checked without reading all of it."""
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"
