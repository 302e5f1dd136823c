"""A device that computes: torch's spare backend under a vendor's name, its tensors' values being in CPU memory.

All operations of torch run, on the values. What it has in common with a vendor's device is what torch and this library
see of it: its name, its module, tensors that are not on the CPU. Their storages have no bytes, so that `torch.save` cannot
write them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree, backend_registration

KEY = "PrivateUse1"
CAN_PLAY = hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and hasattr(
    backend_registration, "_DummyPrivateUse1Hook"
)

_values: dict[int, torch.Tensor] = {}
"""The values by the storage of the tensor, which its copies share."""
_libraries: list[Any] = []


def _played(values: torch.Tensor) -> torch.Tensor:
    """A tensor on the played device with these values."""
    made: torch.Tensor = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)  # type: ignore[attr-defined]
    _values[made.untyped_storage()._cdata] = values
    return made


class Driver(ModuleType):
    """What the vendor's library adds to torch."""

    def __init__(self, name: str) -> None:
        super().__init__(f"torch.{name}")
        self.seed, self.chosen, self.calls = 0, 0, []  # type: ignore[var-annotated]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return self.chosen

    def set_device(self, index: int) -> None:
        self.chosen = index

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        self.seed = seed

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.set_rng_state(states[0])

    def get_rng_state(self) -> torch.Tensor:
        return torch.tensor([self.seed])

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.seed = int(state[0])

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**30, 2**31


def play(name: str) -> Driver:
    """Give this process a device of that name; once per process."""
    driver = Driver(name)
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_run, KEY)
    some.impl("empty.memory_format", _empty, KEY)
    some.impl("empty_strided", lambda size, stride, **options: _empty(size, **options), KEY)
    some.impl("_copy_from", _copy, KEY)
    _libraries.extend((everything, some))  # they unregister when they are collected
    backend_registration._setup_privateuseone_for_python_backend(name, driver)  # type: ignore[attr-defined]
    return driver


def _on_cpu(item: Any) -> Any:
    if isinstance(item, torch.device) and item.type != "meta":
        return torch.device("cpu")
    if isinstance(item, torch.Tensor) and item.device.type not in ("cpu", "meta"):
        return _values[item.untyped_storage()._cdata]
    return item


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    given = {id(_on_cpu(leaf)): leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    on_cpu_args, on_cpu_kwargs = _pytree.tree_map(_on_cpu, (args, kwargs))
    result = op(*on_cpu_args, **on_cpu_kwargs)

    def played(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return given[id(item)] if id(item) in given else _played(item)  # an operation in place returns what it got

    return _pytree.tree_map(played, result)


def _empty(size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return _played(torch.empty(size, dtype=dtype))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _on_cpu(target).copy_(_on_cpu(source))
    return target
