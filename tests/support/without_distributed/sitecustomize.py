"""With this folder on PYTHONPATH, torch is as if it had been built without torch.distributed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

BUILT_WITH_DISTRIBUTED = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")


class WithoutDistributed(importlib.abc.MetaPathFinder):
    """Loads `torch._C` and takes from it what only those builds have; `torch.distributed` asks for these names."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch._C":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_take(module: ModuleType) -> None:
            load(module)
            for name in BUILT_WITH_DISTRIBUTED:
                if hasattr(module, name):
                    delattr(module, name)

        spec.loader.exec_module = load_and_take  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutDistributed())
