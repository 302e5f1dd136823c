"""The kinds of devices, one row each: how to find one, and what it needs and can do."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from accel_state.clusters import ClusterPlace
from accel_state.enums import DistributedType
from accel_state.environment import patch_environment
from accel_state.nvidia import avoid_unsupported_transfers, check_cuda_fp8_capability
from accel_state.xla_runtime import is_spmd, is_wanted


@functools.cache
def _load(library: str) -> bool:
    """Import the library that adds a device to torch; False when it is missing or does not work on this machine."""
    if find_spec(library.partition(".")[0]) is None:
        return False
    try:
        importlib.import_module(library)
    except (ImportError, OSError, RuntimeError):  # a driver is missing: this machine has no such device
        return False
    return True


@functools.cache
def is_gaudi1() -> bool:
    """Whether the Gaudi is one of the first generation, which lacks 16-bit floats; asked where there is one."""
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


class DeviceKind(NamedTuple):
    """One kind of device. The defaults describe a module `torch.<name>` with several devices that have an index."""

    name: str
    """As in `torch.device(name)`."""
    distributed_type: DistributedType
    """What a run of several processes on such devices is called."""
    collective_backend: str | None
    """The backend of `torch.distributed` for them; None where there is none."""
    visible_devices_variable: str | None = None
    """The environment variable that restricts a process to some of them."""
    library: str | None = None
    """The library that must be imported before torch knows the kind; None for those built in."""
    backend_library: str | None = None
    """The library that must be imported before `torch.distributed` knows the backend."""
    numbered: bool = True
    """Whether a process picks one of several with `set_device(index)`."""
    bf16: bool | Callable[[], bool] | None = None
    """Support of bfloat16; None to ask `torch.<name>.is_bf16_supported()`."""
    fp16: bool | Callable[[], bool] = True
    """Support of float16."""
    fp8: bool | Callable[[], bool] = True
    """Support of 8-bit floats; True also where it is left to the library that computes in them."""
    instead_of_fp8: str = "fp16"
    """The mixed precision of runs that ask for 8-bit floats where they are not supported."""
    probe_variable: str | None = None
    """Set to 1 while devices are detected, so that this does not initialize the driver and processes may still fork."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables and their values, set once the kind is chosen unless they are set already."""
    downcast_variable: str | None = None
    """The environment variable that has float32 and float64 stored as bfloat16; None where there is none."""
    always_distributed: bool = False
    """Whether a run of one process counts as distributed too."""
    compiles_collectives: bool = False
    """Whether each size of a collective's buffer is compiled, so that there should be few."""
    before_group: Callable[[], None] | None = None
    """Called before the first process group of a run of several processes starts."""

    # ---- finding ------------------------------------------------------------------------------------------------

    def module(self) -> Any:
        """The module of torch for the kind, such as `torch.cuda`; None where there is none."""
        module = getattr(torch, self.name, None)
        if module is None and self.library is not None and _load(self.library):
            module = getattr(torch, self.name, None)
        return module if isinstance(module, ModuleType) else None

    def is_available(self) -> bool:
        """Whether this machine has a usable device of this kind."""
        module = self.module()
        if module is None:
            return False
        if self.probe_variable is None:
            return bool(module.is_available())
        with patch_environment(**{self.probe_variable: "1"}):
            return bool(module.is_available())

    def device_count(self) -> int:
        """The number of devices that are visible to this process."""
        module = self.module()
        return int(module.device_count()) if module is not None and self.is_available() else 0

    # ---- using --------------------------------------------------------------------------------------------------

    def device(self, index: int | None = None) -> torch.device:
        """The device of that index; without an index, the current one."""
        return torch.device(self.name, index) if self.numbered and index is not None else torch.device(self.name)

    def index_of(self, local_rank: int, may_share: bool = False) -> int | None:
        """The device index of the process of that local rank; None where devices have no index.

        Args:
            local_rank: The rank of the process on its machine.
            may_share: Whether several processes may use one device, as with backends of the CPU.

        Raises:
            ValueError: When there are fewer devices than processes, which may not share them.
        """
        if not self.numbered:
            return None
        count = self.device_count()
        if local_rank < count:
            return local_rank
        if count == 1:  # the launcher shows each process only its own
            return 0
        if may_share and count:
            return local_rank % count
        raise ValueError(
            f"Local rank {local_rank} needs a {self.name!r} device of its own, but {count} are visible: "
            f"start at most {count} processes here, pass cpu=True, or let them share devices with backend='gloo'."
            + (f" ({self.visible_devices_variable} may hide devices.)" if self.visible_devices_variable else "")
        )

    def set_device(self, index: int | None) -> None:
        """Make the device of that index the current one, where devices have an index."""
        for name, value in self.variables:
            os.environ.setdefault(name, value)
        if self.numbered and index is not None:
            self.module().set_device(index)

    def supports_bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        if self.bf16 is None:
            return bool(self.module().is_bf16_supported())
        return self.bf16() if callable(self.bf16) else self.bf16

    def supports_fp16(self) -> bool:
        """Whether it computes in float16."""
        return self.fp16() if callable(self.fp16) else self.fp16

    def supports_fp8(self) -> bool:
        """Whether it computes in 8-bit floats."""
        return self.fp8() if callable(self.fp8) else self.fp8

    def empty_cache(self) -> None:
        """Release cached memory that is not in use to the driver, where the kind has a caching allocator."""
        empty = getattr(self.module(), "empty_cache", None)
        if empty is not None:
            empty()

    def rng_module(self) -> Any:
        """The module with `get_rng_state` and `set_rng_state` of its generator; None where only the CPU's is used."""
        module = self.module()
        return module if hasattr(module, "get_rng_state") else None

    def seed(self, seed: int) -> None:
        """Seed the generators of all its devices."""
        seed_all = getattr(self.rng_module(), "manual_seed_all", None)
        if seed_all is not None:
            seed_all(seed)

    def synchronize(self) -> None:
        """Wait until this process's device has done all work, where it works on its own."""
        wait = getattr(self.module(), "synchronize", None)
        if wait is not None:
            wait()

    # ---- processes ----------------------------------------------------------------------------------------------

    def check_mesh_dims(self, active: Sequence[str]) -> None:
        """Raise an error for dimensions of a device mesh along which it cannot train.

        Args:
            active: The names of the dimensions in use.
        """

    def load_backend(self) -> None:
        """Import the library that registers the backend with `torch.distributed`, where there is one."""
        if self.backend_library is not None:
            _load(self.backend_library)

    def own_place(self) -> ClusterPlace | None:
        """Rank and world size where the kind's runtime sets them; None where a launcher does."""
        return None

    def barrier(self, index: int | None) -> None:
        """A barrier of the default process group."""
        if index is None:
            torch.distributed.barrier()
        else:
            torch.distributed.barrier(device_ids=[index])


@final
class XlaKind(DeviceKind):
    """Devices of torch_xla (TPUs), whose runtime starts the processes and sets their ranks."""

    @override
    def module(self) -> Any:
        """`torch_xla.core.xla_model`; None where torch_xla is missing."""
        return importlib.import_module("torch_xla.core.xla_model") if _load("torch_xla") else None

    @override
    def is_available(self) -> bool:
        """Whether torch_xla is installed, its devices are wanted, and `USE_TORCH_XLA` does not forbid it."""
        return is_wanted() and _load("torch_xla")

    @override
    def device_count(self) -> int:
        """The number of devices of all processes together."""
        return int(self._runtime().global_runtime_device_count()) if self.is_available() else 0

    @override
    def device(self, index: int | None = None) -> torch.device:
        """The device of this process, whatever the number; from now on, `torch_xla.runtime.use_spmd()` comes too late."""
        if not _SPMD_AT_START:
            _SPMD_AT_START.append(is_spmd())
        return importlib.import_module("torch_xla").device()

    def is_spmd(self) -> bool:
        """Whether this process drives all devices.

        Raises:
            RuntimeError: When `torch_xla.runtime.use_spmd()` was called after the device of this process was chosen.
        """
        if _SPMD_AT_START and is_spmd() != _SPMD_AT_START[0]:
            raise RuntimeError(
                "torch_xla.runtime.use_spmd() was called after the first PartialState, Accelerator or TrainingArguments "
                "had chosen one device. Call it at the start of the program, or set XLA_USE_SPMD=1."
            )
        return is_spmd()

    @override
    def empty_cache(self) -> None:
        """Nothing to do: the compiler plans the memory."""

    @override
    def seed(self, seed: int) -> None:
        """Seed the generator of this process's device, which has no other state than its seed."""
        self.module().set_rng_state(seed)

    @override
    def synchronize(self) -> None:
        """Run what was recorded, and wait for it."""
        importlib.import_module("torch_xla").sync(wait=True)

    @override
    def check_mesh_dims(self, active: Sequence[str]) -> None:
        """Raise an error for all of them: torch_xla has a mesh of its own.

        Raises:
            ValueError: Naming them.
        """
        if active:
            raise ValueError(
                f"ParallelismConfig uses {', '.join(active)}, but XLA devices are arranged by torch_xla: leave it out, call "
                "torch_xla.runtime.use_spmd() and, to shard parameters, pass FullyShardedDataParallelPlugin(fsdp_version=2)."
            )

    @override
    def own_place(self) -> ClusterPlace | None:
        runtime = self._runtime()
        return ClusterPlace(
            cluster=self.name,
            rank=runtime.global_ordinal(),
            world_size=runtime.world_size(),
            local_rank=runtime.local_ordinal(),
            local_world_size=runtime.local_process_count(),
        )

    @override
    def barrier(self, index: int | None) -> None:
        """A barrier of all processes, by rendezvous."""
        self.module().rendezvous("accelerate.wait_for_everyone")

    @staticmethod
    def _runtime() -> Any:
        return importlib.import_module("torch_xla.runtime")


_SPMD_AT_START: list[bool] = []
"""Whether one process drove all devices when the device of this process was chosen."""

# In the order of preference: the first kind that is available is used. CPU comes last and always is.
DEVICE_KINDS: tuple[DeviceKind, ...] = (
    XlaKind(
        "xla",
        DistributedType.XLA,
        "xla",
        "TPU_VISIBLE_CHIPS",
        library="torch_xla",
        backend_library="torch_xla.distributed.xla_backend",
        numbered=False,
        bf16=True,
        fp16=False,
        fp8=False,
        instead_of_fp8="bf16",
        downcast_variable="XLA_DOWNCAST_BF16",
        always_distributed=True,
    ),
    DeviceKind(
        "hpu",
        DistributedType.MULTI_HPU,
        "hccl",
        "HABANA_VISIBLE_MODULES",
        library="habana_frameworks.torch",
        backend_library="habana_frameworks.torch.distributed.hccl",
        numbered=False,
        bf16=True,
        fp16=lambda: not is_gaudi1(),
        fp8=lambda: not is_gaudi1(),
        instead_of_fp8="bf16",
    ),
    # before "cuda": their libraries can have torch.cuda answer for them
    DeviceKind("npu", DistributedType.MULTI_NPU, "hccl", "ASCEND_RT_VISIBLE_DEVICES", library="torch_npu"),
    DeviceKind(
        "mlu",
        DistributedType.MULTI_MLU,
        "cncl",
        "MLU_VISIBLE_DEVICES",
        library="torch_mlu",
        probe_variable="PYTORCH_CNDEV_BASED_MLU_CHECK",
    ),
    DeviceKind("musa", DistributedType.MULTI_MUSA, "mccl", "MUSA_VISIBLE_DEVICES", library="torch_musa", bf16=True),
    DeviceKind("sdaa", DistributedType.MULTI_SDAA, "tccl", "SDAA_VISIBLE_DEVICES", library="torch_sdaa", bf16=True),
    DeviceKind(  # ROCm builds of torch answer to the same names
        "cuda",
        DistributedType.MULTI_GPU,
        "nccl",
        "CUDA_VISIBLE_DEVICES",
        fp8=check_cuda_fp8_capability,
        probe_variable="PYTORCH_NVML_BASED_CUDA_CHECK",
        before_group=avoid_unsupported_transfers,
    ),
    DeviceKind("xpu", DistributedType.MULTI_XPU, "xccl", "ZE_AFFINITY_MASK", bf16=True),
    DeviceKind(
        "neuron",
        DistributedType.MULTI_NEURON,
        "neuron",
        "NEURON_RT_VISIBLE_CORES",
        library="torch_neuronx",
        bf16=True,
        compiles_collectives=True,
    ),
    DeviceKind(
        "mps",
        DistributedType.NO,
        None,
        numbered=False,
        bf16=lambda: torch.backends.mps.is_macos_or_newer(14, 0),
        variables=(("PYTORCH_ENABLE_MPS_FALLBACK", "1"),),
    ),
    DeviceKind("cpu", DistributedType.MULTI_CPU, "gloo", numbered=False, bf16=True),
)
ENTRY_POINTS = "accelerate.devices"
"""The entry points by which other packages add rows."""


def device_kinds() -> tuple[DeviceKind, ...]:
    """All rows in the order of preference: those of other packages, then the table's.

    Other packages are asked only where a library has named torch's `privateuse1` backend, as each device outside torch must.
    """
    return _device_kinds(torch._C._get_privateuse1_backend_name())


@functools.cache
def _device_kinds(privateuse1: str) -> tuple[DeviceKind, ...]:
    if privateuse1 == "privateuseone":
        return DEVICE_KINDS
    return (*(entry.load() for entry in entry_points(group=ENTRY_POINTS)), *DEVICE_KINDS)


def device_kind(name: str) -> DeviceKind:
    """The row of the kind called `name`, such as `"cuda"`.

    Raises:
        ValueError: When there is no such row.
    """
    kinds = device_kinds()
    for kind in kinds:
        if kind.name == name:
            return kind
    raise ValueError(f"{name!r} is not a device kind: use one of {', '.join(kind.name for kind in kinds)}.")


def detect_device_kind() -> DeviceKind:
    """The kind of this machine's device: the first available one of the table."""
    return next(kind for kind in device_kinds() if kind.is_available())


def default_device() -> torch.device:
    """The default device of this machine, without creating a state or starting a process group."""
    return detect_device_kind().device()


def resolve_device(device: int | str | torch.device) -> torch.device:
    """A device with its index, as tensors on it have it: `"cuda"` is the current one.

    `torch.device("cuda")` is unequal to `torch.device("cuda", 0)`, and in another thread than the main one it may be another
    device. So devices that users name are resolved where they enter, in the main thread.

    Args:
        device: A device; those without indices, and those of other machines, come back as they are.
    """
    resolved = torch.device(device)
    if resolved.index is not None or resolved.type in ("cpu", "meta"):
        return resolved
    if resolved.type == "mps":
        return torch.device("mps", 0)
    module: Any = getattr(torch, resolved.type, None)
    current = getattr(module, "current_device", None)
    if current is None or not module.is_available():
        return resolved
    index = current()
    return torch.device(resolved.type, index) if isinstance(index, int) else resolved
