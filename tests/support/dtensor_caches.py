"""Torch's caches of how DTensors move; what they are called differs from 2.9 to the newest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def forget_meshes() -> None:
    """Empty the caches: they hold on to meshes, whose process groups have ended."""
    if "torch.distributed.tensor" in sys.modules:
        clearing = list(_clearing_functions())
        assert clearing, "this torch has other caches: name them here"
        for clear in clearing:
            clear()
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    meshes = getattr(device_mesh, "_mesh_resources", None)  # torch 2.9: by meshes, which are equal in every test
    for name in ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(meshes, name, {}).clear()


def _clearing_functions() -> Iterator[Any]:
    import torch
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    sharding: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    places: tuple[tuple[Any, str], ...] = (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),  # from 2.10
        (sharding, "cache_clear"),
        (getattr(sharding, "cache", None), "cache_clear"),  # 2.9
        (_redistribute._gen_transform_infos, "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),  # from 2.10
        (_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"),
    )
    for holder, name in places:
        clear = getattr(holder, name, None)
        if callable(clear):
            yield clear
