"""Sizes, device maps, hooks and offloading are those of accelerate 1.15."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_models_larger_than_memory() -> None:
    intended = {
        "tensors * True True True": "buffers that are not saved are left out at any depth, not in the root only",
        "map buffers *": "buffers that modules hold themselves get a device and count; 1.15 leaves them out",
        "map_in_full buffers *": "the same",
        "map weights * fallback=True *": "where 1.15 fails, because nothing is left to fall back to",
        "sizes* int4": "sizes are whole bytes",
        "buffer_size * int4": "the same",
        "file_size '1TB'": "terabytes are sizes, too",
        "balanced * False *": "the share leaves room for the largest block; 1.15 takes the first one of each class",
        "balanced True * 6 *": "a device without memory in the middle does not change what the last one can take",
        "check_tied *": "what a map lacks is told by check_device_map; this one only warns",
        "whole * load": "tied weights stay tied",
        "whole * cpu": "the same, while they are offloaded",
        "whole * disk": "the same",
    }
    same("big_models", intended=intended, least=16_000)
