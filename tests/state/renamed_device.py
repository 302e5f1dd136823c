"""Run by `test_renamed_devices.py` in a process of its own: torch's spare device under the names of several vendors.

A name can be given once per process, so each gets a fork.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from accel_state.accelerator_state import AcceleratorState
from accel_state.devices import default_device, detect_device_kind, device_kind
from accel_state.enums import DistributedType
from accel_state.errors import MissingLibraryError
from accel_state.processes import PartialState


class Driver(types.ModuleType):
    """What a vendor's library adds to torch, as far as it does not touch memory."""

    chosen: int | None = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.chosen = index

    def is_bf16_supported(self) -> bool:
        return True


def rename(name: str) -> Driver:
    torch.utils.rename_privateuse1_backend(name)
    driver = Driver(f"torch.{name}")
    torch._register_device_module(name, driver)
    return driver


def launched(rank: int, world_size: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip


def one_process(name: str) -> None:
    driver = rename(name)
    assert detect_device_kind().name == name
    assert default_device() == torch.device(name)
    state = PartialState()
    assert state.device == torch.device(name)
    assert state.distributed_type == DistributedType.NO
    assert driver.chosen is None
    assert device_kind(name).supports_bf16()
    assert AcceleratorState(mixed_precision="bf16", _from_accelerator=True).device == torch.device(name)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState(cpu=True).device == torch.device("cpu")
    PartialState._reset_state()
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{name}:1"
    assert PartialState().device == torch.device(name, 1)
    assert driver.chosen == 1


def missing_backend(name: str) -> None:
    rename(name)
    launched(0, 2)
    with pytest.raises(MissingLibraryError, match=f"'{device_kind(name).collective_backend}' .* pass cpu=True"):
        PartialState()
    assert not dist.is_initialized()
    assert PartialState._shared_state == {}


def several_processes(name: str) -> None:
    """The vendor's backend is played by gloo; one process is enough to see what is chosen."""
    driver = rename(name)
    kind = device_kind(name)
    dist.Backend.register_backend(
        str(kind.collective_backend),
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["cpu", name],
    )
    launched(1, 2)
    os.environ.update(RANK="0", WORLD_SIZE="1")  # but still the second of its machine
    state = PartialState(store=dist.HashStore())
    assert state.backend == kind.collective_backend
    assert state.distributed_type == kind.distributed_type
    assert state.local_process_index == 1
    assert state.device == torch.device(name, 1)
    assert driver.chosen == 1
    state.wait_for_everyone()
    state.destroy_process_group()
    PartialState._reset_state()
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
    assert PartialState(store=dist.HashStore()).backend == f"cpu:gloo,{name}:{kind.collective_backend}"
    PartialState().destroy_process_group()


def too_few_devices(name: str) -> None:
    rename(name)
    dist.Backend.register_backend(str(device_kind(name).collective_backend), lambda *_: None, devices=[name])
    launched(2, 3)
    with pytest.raises(ValueError, match="2 are visible"):
        PartialState()
    assert not dist.is_initialized()


def main(names: list[str]) -> int:
    for name in names:
        for body in (one_process, missing_backend, several_processes, too_few_devices):
            if not _passes_in_a_fork(body, name):
                return 1
    return 0


def _passes_in_a_fork(body: Callable[[str], None], name: str) -> bool:
    child = os.fork()
    if child == 0:
        try:
            body(name)
        except BaseException:
            traceback.print_exc()
            sys.stderr.write(f"{body.__name__}({name!r}) failed\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
