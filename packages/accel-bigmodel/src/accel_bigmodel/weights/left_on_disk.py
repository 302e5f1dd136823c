"""Weights that a device map offloads to disk: used from the checkpoint's own files, or written to a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from accel_bigmodel.offload.folder import Index, offload_weight, save_offload_index
from accel_bigmodel.weights.contents import CheckpointContents
from accel_bigmodel.weights.placing import Placement, scales_name
from accel_bigmodel.weights.progress import ByteProgress
from accel_ops.files.durable import make_folder

StrPath = str | os.PathLike[str]


def needs_copy(placement: Placement, contents: CheckpointContents) -> bool:
    """Whether a weight has to be written again: its file cannot be memory-mapped, or has another dtype."""
    stored = contents.dtype_and_shape(placement.source)
    return contents.mapped_file(placement.source) is None or stored is None or stored[0] != placement.dtype


def check_room(placements: Sequence[Placement], contents: CheckpointContents, folder: StrPath | None) -> None:
    """Check that there is a folder, on a disk with enough room, for the weights that have to be written.

    Raises:
        ValueError: No folder was given although one is needed.
        OSError: The disk has not enough room.
    """
    written = [each for each in placements if each.is_offloaded and needs_copy(each, contents)]
    if not written:
        return
    first = written[0]
    if folder is None:
        reason = (
            "it is not in a safetensors file"
            if contents.mapped_file(first.source) is None
            else f"its dtype changes to {str(first.dtype).removeprefix('torch.')}"
        )
        raise ValueError(
            f"The device map offloads {first.name!r} to disk, and it has to be written there because {reason} "
            f"({len(written)} such weights): pass offload_folder."
        )
    total = sum(placement.num_bytes for placement in written)
    free = shutil.disk_usage(
        next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    ).free
    if total > free:
        raise OSError(
            f"Offloading needs {total / 1e9:.2f} GB in {os.fspath(folder)}, where only {free / 1e9:.2f} GB are "
            "free: make room, choose another offload_folder, or load a safetensors checkpoint without a dtype."
        )


def leave_on_disk(
    placements: Sequence[Placement],
    contents: CheckpointContents,
    folder: StrPath | None,
    with_scales: bool = False,
    show_progress: bool = True,
) -> Index:
    """Make the index of offloaded weights, and write those that no safetensors file holds in the wanted dtype.

    Args:
        placements: What `plan_placements` gave.
        contents: The checkpoint.
        folder: Where weights and the index are written.
        with_scales: Include the scales of 8-bit weights.
        show_progress: Show a bar if it takes long.

    Returns:
        By name: `dtype` and `shape`, and `safetensors_file` and `weight_name` of those that are not in the folder.
    """
    index: Index = {}
    offloaded = [placement for placement in placements if placement.is_offloaded]
    written = [placement for placement in offloaded if needs_copy(placement, contents)]
    for placement in offloaded:
        index[placement.name] = _index_entry(placement.source, placement.dtype, placement.shape, contents)
        scales = scales_name(placement.source)
        if with_scales and scales in contents and contents.mapped_file(scales) is not None:
            stored = contents.dtype_and_shape(scales)
            assert stored is not None  # a safetensors file holds nothing but tensors
            index[scales_name(placement.name)] = _index_entry(scales, *stored, contents)
    if folder is not None and index:
        make_folder(folder)
        total = sum(placement.num_bytes for placement in written)
        with ByteProgress(total, "Writing weights", show_progress) as progress:
            for placement in written:
                weight = contents.tensor(placement.source).to(placement.dtype)
                index.pop(placement.name)
                offload_weight(weight, placement.name, folder, index)
                progress.advance(placement.num_bytes)
        save_offload_index(index, folder)
    return index


def _index_entry(
    source: str, dtype: torch.dtype, shape: Sequence[int], contents: CheckpointContents
) -> dict[str, object]:
    return {
        "safetensors_file": contents.mapped_file(source),
        "weight_name": source,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
