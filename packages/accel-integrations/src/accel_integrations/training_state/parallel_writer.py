"""A model folder that all ranks write together: each its byte ranges of every safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_bigmodel.weights.write import (
    SAFETENSORS,
    count_bytes,
    index_content,
    parse_size,
    publish_folder,
    split_into_shards,
)
from accel_ops.files.byte_ranges import write_chunk
from accel_ops.files.staging import StagedFolder
from accel_ops.files.tensor_files import check_tensors, clean_state_dict_for_safetensors, file_layout
from accel_ops.modules import to_local
from accel_state.supervision import report_progress


@dataclass(frozen=True)
class PlannedFile:
    """A file of the folder.

    Attributes:
        header: Its first bytes.
        places: The position of each tensor in it, in bytes.
        num_bytes: Its size.
    """

    header: bytes
    places: dict[str, int]
    num_bytes: int


class ParallelFolderWriter:
    """A model folder that ranks fill in, on the main process; it appears when it is published.

    Args:
        folder: The folder; created if missing.
        weights: The state dict of the main process, with DTensors.
        max_shard_size: Limit of one weights file, a number of bytes or a str such as `"10GB"`.

    Attributes:
        path: Where the files are while they are written.
        files: The files to fill in, by name.

    Raises:
        TypeError: A tensor cannot be saved as safetensors.
        OSError: A file could not be written.
    """

    def __init__(self, folder: Path, weights: Mapping[str, torch.Tensor], max_shard_size: int | str) -> None:
        local = {name: to_local(value) for name, value in weights.items()}
        check_tensors(local)
        tensors = {name: weights[name] for name in clean_state_dict_for_safetensors(local)}
        shards = SAFETENSORS.name_shards(split_into_shards(tensors, parse_size(max_shard_size)))
        self.files = {file_name: _plan({name: tensors[name] for name in names}) for file_name, names in shards.items()}
        self._index = index_content(shards, count_bytes(tensors)) if len(shards) > 1 else None
        self._staged = StagedFolder(folder)
        self.path = self._staged.path
        try:
            for file_name, planned in self.files.items():
                _create(self.path / file_name, planned.header, planned.num_bytes)
            if self._index is not None:
                _create(self.path / SAFETENSORS.index_name, self._index, len(self._index))
        except BaseException:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in all files."""
        return sum(planned.num_bytes - len(planned.header) for planned in self.files.values())

    def publish(self, num_bytes: int) -> None:
        """Publish the folder.

        Args:
            num_bytes: What all ranks have written together.

        Raises:
            RuntimeError: Some byte ranges are missing, or were written twice.
        """
        if num_bytes != self.num_bytes:
            raise RuntimeError(
                f"The ranks wrote {num_bytes} bytes of weights, but the model has {self.num_bytes}. Save with "
                "safe_serialization=False, which gathers the weights on the main process."
            )
        last = SAFETENSORS.index_name if self._index is not None else next(iter(self.files))
        publish_folder(self._staged, SAFETENSORS, last)

    def discard(self) -> None:
        """Remove what was written."""
        self._staged.discard()


def fill_in(path: Path, files: Mapping[str, PlannedFile], weights: Mapping[str, torch.Tensor]) -> int:
    """Write this rank's byte ranges of all files, one tensor at a time, and sync them to the disk.

    Args:
        path: Where the files are.
        files: From the main process.
        weights: The state dict of this rank.

    Returns:
        The number of bytes written.

    Raises:
        OSError: A file could not be written.
    """
    total = 0
    for file_name, planned in files.items():
        descriptor = os.open(path / file_name, os.O_WRONLY)
        try:
            for name, byte_range in planned.places.items():
                report_progress()
                for offsets, chunk in rank_chunks(weights[name]):
                    total += write_chunk(descriptor, byte_range, weights[name].shape, offsets, chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return total


def can_fill_in(weights: Mapping[str, Any]) -> bool:
    """Whether each rank's shard is one chunk of its tensor: not where two mesh dimensions shard the same dimension.

    Args:
        weights: A state dict, whose placements are the same on all ranks.
    """
    return all(
        type(placement).__name__ in ("Shard", "Replicate")
        for value in weights.values()
        for placement in getattr(value, "placements", ())
    )


def rank_chunks(tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The chunks of a tensor that this rank writes: of replicas, the first one does.

    Args:
        tensor: A tensor, the same on all ranks, or a DTensor.

    Yields:
        The first index of each chunk in the full tensor, and its values.
    """
    sharded: Any = tensor
    if to_local(tensor) is tensor:
        if not dist.is_initialized() or dist.get_rank() == 0:
            yield (0,) * tensor.dim(), tensor
        return
    mesh = sharded.device_mesh
    coordinates = mesh.get_coordinate()
    is_first = 0 in mesh.mesh.flatten().tolist() and all(
        placement.is_shard() or coordinate == 0
        for placement, coordinate in zip(sharded.placements, coordinates, strict=True)
    )
    if not is_first:
        return
    for chunk in sharded.__create_chunk_list__():
        yield tuple(chunk.offsets), to_local(tensor)


def _plan(tensors: Mapping[str, torch.Tensor]) -> PlannedFile:
    header, places = file_layout(tensors, {"format": "pt"})
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return PlannedFile(header, places, len(header) + num_bytes)


def _create(path: Path, content: bytes, num_bytes: int) -> None:
    """Create a file of a size with its first bytes, and sync it to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.truncate(num_bytes)
        file.flush()
        os.fsync(file.fileno())
