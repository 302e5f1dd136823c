"""Says on which device a run is."""

from __future__ import annotations

from accelerate import PartialState
from outside import device

device.load()
state = PartialState()
print("device", state.device, state.distributed_type.value)
