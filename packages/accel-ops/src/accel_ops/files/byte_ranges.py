"""Writing a rectangular chunk of a tensor into a file that holds the full tensor, row-major."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Iterator, Sequence

import torch


def chunk_runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The consecutive runs of a chunk's values in the full tensor.

    Args:
        shape: The full shape.
        offsets: The first index of the chunk in each dimension.
        sizes: The chunk's shape.

    Yields:
        For each run, the position of its first value in the full tensor, that in the chunk, and the number of values.
    """
    if not math.prod(sizes):
        return
    outer = len(shape)  # dimensions before a run: behind them, all but the first are full
    while outer and sizes[outer:] == shape[outer:]:
        outer -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, sizes[:outer]))):
        yield base + sum(one * stride for one, stride in zip(index, strides, strict=False)), number * count, count


def write_chunk(
    descriptor: int, position: int, shape: Sequence[int], offsets: Sequence[int], chunk: torch.Tensor
) -> int:
    """Write a chunk of a tensor into a file.

    Args:
        descriptor: The open file.
        position: Where the full tensor begins in it, in bytes.
        shape: The full shape.
        offsets: The first index of the chunk in each dimension.
        chunk: The chunk, on any device.

    Returns:
        The number of bytes written.

    Raises:
        OSError: The file could not be written.
    """
    values = chunk.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    width = values.element_size()
    content = memoryview((ctypes.c_ubyte * (values.numel() * width)).from_address(values.data_ptr())).cast("B")
    for place, begin, count in chunk_runs(tuple(shape), tuple(offsets), tuple(values.shape)):
        left, at = content[begin * width : (begin + count) * width], position + place * width
        while left:
            written = _write_at(descriptor, left, at)
            left, at = left[written:], at + written
    return len(content)


def _write_at(descriptor: int, data: memoryview, position: int) -> int:
    if hasattr(os, "pwrite"):  # not on Windows
        return os.pwrite(descriptor, data, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.write(descriptor, data)
