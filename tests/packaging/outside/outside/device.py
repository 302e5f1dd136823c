"""A device: one row, for torch's spare device under a name of its own."""

from __future__ import annotations

from types import ModuleType

import torch

from accel_state.devices import DeviceKind
from accel_state.enums import DistributedType

TOY = DeviceKind("toy", DistributedType.MULTI_GPU, "toyccl", "TOY_VISIBLE_DEVICES", bf16=True)


class Driver(ModuleType):
    """What the vendor's library adds to torch, as far as it does not touch memory."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        pass


def load() -> None:
    """What importing the vendor's library does."""
    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", Driver("torch.toy"))
