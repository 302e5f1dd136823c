"""Images as PNG files, from arrays and tensors, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> PNG's number for them


def encode_png(image: Any) -> bytes:
    """Encode an image.

    Args:
        image (array or tensor): Of shape (height, width), (height, width, channels) or (channels, height, width) with
            1 to 4 channels; 8-bit integers, or floats, of which 0 is black and 1 white. Where a shape could be read
            both ways, a tensor of torch has its channels first, an array of another library last.

    Raises:
        ValueError: For another shape.
    """
    shape, values = _shape_and_bytes(image)
    height, width, channels = shape
    row_bytes = width * channels
    rows = b"".join(b"\0" + values[start : start + row_bytes] for start in range(0, height * row_bytes, row_bytes))
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 6)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _shape_and_bytes(image: Any) -> tuple[tuple[int, int, int], bytes]:
    import numpy as np

    is_tensor = callable(getattr(image, "detach", None))
    if is_tensor:
        image = image.detach().cpu()
        image = image.float().numpy() if image.is_floating_point() else image.numpy()
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3:
        could_be_first, could_be_last = array.shape[0] in COLOUR_TYPES, array.shape[2] in COLOUR_TYPES
        if could_be_first and (is_tensor or not could_be_last) and np.ndim(image) == 3:
            array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in COLOUR_TYPES or 0 in array.shape:
        raise ValueError(
            f"An image of shape {np.asarray(image).shape} cannot be written as PNG. Pass (height, width), (height, width, "
            "channels) or (channels, height, width) with 1 to 4 channels."
        )
    if array.dtype.kind == "f":
        array = (np.nan_to_num(array).clip(0, 1) * 255).round()
    elif array.dtype.kind == "b":
        array = array * 255
    array = array.clip(0, 255).astype(np.uint8)
    return (array.shape[0], array.shape[1], array.shape[2]), array.tobytes()
