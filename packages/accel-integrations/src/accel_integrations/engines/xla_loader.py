"""Data loaders that copy batches to XLA devices, each tensor sharded over them under SPMD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from accel_data.skipping import skip_first_batches
from accel_ops.nested import recursively_apply
from accel_state.public_names import known_as

OWN = frozenset({"_loader", "_device", "_parallel_loader_kwargs", "_parallel_loader", "_sharding_of"})


@final
@known_as("accelerate.data_loader.MpDeviceLoaderWrapper")
class MpDeviceLoaderWrapper(MpDeviceLoader):
    """Copies the batches of a prepared loader to the device, and lets the device run what was recorded for each.

    It looks like the loader that it wraps. Unlike torch_xla's own class it reads in the thread of the program, because
    what marks the end of an epoch must be known when a batch is used, not when it is read ahead; while the host reads, the device
    computes.

    Args:
        dataloader: A prepared loader, which leaves batches in CPU memory.
        device (`torch.device`): The device of batches.
        sharding_of: Returns the `ShardingSpec` of a tensor of a batch; None for tensors that are not sharded.

    Attributes:
        _parallel_loader_kwargs (`dict`): `input_sharding` in it takes precedence, for tensors that it fits; other
            libraries set it.
    """

    def __init__(
        self,
        dataloader: Any,
        device: torch.device,
        sharding_of: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__(dataloader, device)
        self._sharding_of = sharding_of

    @property
    def dataloader(self) -> Any:
        """The wrapped loader."""
        return self._loader

    @property
    def device(self) -> torch.device:
        """The device of batches."""
        device: torch.device = self._device
        return device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield recursively_apply(self._on_device, batch)
            torch_xla.sync()  # the device starts to work on this step while the next batch is read
        torch_xla.sync()

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "xla":
            return tensor
        sharding = self._parallel_loader_kwargs.get("input_sharding")
        if sharding is None or not sharding.can_apply(tensor):
            sharding = None if self._sharding_of is None else self._sharding_of(tensor)
        moved: torch.Tensor = xm.send_cpu_data_to_device([tensor], self._device, sharding)[0]
        return moved

    def without_first(self, num_batches: int) -> MpDeviceLoaderWrapper:
        """A loader like this one without its first batches, as `skip_first_batches` makes them."""
        rest = MpDeviceLoaderWrapper(skip_first_batches(self._loader, num_batches), self._device, self._sharding_of)
        rest._parallel_loader_kwargs = self._parallel_loader_kwargs
        return rest

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # while a copy is being restored
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in OWN else self._loader, name, value)
