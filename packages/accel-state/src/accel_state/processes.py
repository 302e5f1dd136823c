"""`PartialState`: the rank of this process, the world size, and its device."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist

from accel_state import process_group, shutdown, supervision
from accel_state.clusters import ClusterPlace, check_alone, detect_cluster
from accel_state.devices import DeviceKind, default_device, detect_device_kind, device_kind, device_kinds
from accel_state.enums import DistributedType
from accel_state.environment import get_int_from_env, parse_flag_from_env
from accel_state.group_events import observers
from accel_state.nvidia import explain_missing_gpus
from accel_state.public_names import known_as
from accel_state.shared import SharedDict, fact
from accel_state.splitting import split
from accel_state.warning import warn_user

logger = logging.getLogger("accelerate.state")

Function = TypeVar("Function", bound=Callable[..., Any])


def is_initialized() -> bool:
    """True once a `PartialState` was created, and rank and device of this process are known."""
    return PartialState._shared_state != {}


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing, as what the `on_..._process` decorators return on the other processes."""


class ProcessPlace:
    """Attributes and methods that follow from rank, world size and device; the base of the two states."""

    backend: str | None = fact("The backend of collectives, such as 'nccl' or 'gloo'; None without a process group.")
    debug: bool = fact("Whether collectives compare shapes first (`ACCELERATE_DEBUG_MODE`).")
    device: torch.device = fact("The device of models and batches; `ACCELERATE_TORCH_DEVICE` overrides the choice.")
    distributed_type: DistributedType = fact("How the run is spread over processes; `NO` for a single one.")
    local_process_index: int = fact("The rank of this process on its machine, from 0.")
    num_processes: int = fact("The world size: the number of processes, over all machines.")
    process_index: int = fact("The rank of this process among all, from 0.")
    fork_launched: bool = False
    """Whether a notebook forked this process."""
    main_process: Literal["first", "last"] = "first"
    """Which process is the main process."""
    _cpu: bool = fact("Whether the CPU was asked for.")

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process."""
        return self.process_index == 0 if self.main_process == "first" else self.is_last_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.local_process_index == 0 if self.main_process == "first" else self.is_last_process

    # ---- barriers and splitting ---------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this (a barrier).

        After the process group was destroyed (`Accelerator.end_training`) this warns and returns,
        so that a script which saves its model only then does not lose it.

        Example:
            ```python
            if state.is_main_process:
                download()
            state.wait_for_everyone()
            ```
        """
        if not self.use_distributed:
            return
        supervision.report_progress()
        if self.backend is not None and not dist.is_initialized():
            warn_user(
                f"wait_for_everyone() on rank {self.process_index} did not wait, because the process group was already "
                "destroyed. Call it before end_training() or destroy_process_group(), which belong at the very end."
            )
            return
        kind_of(self.device).barrier(self.device.index)
        supervision.report_progress()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run a `with` block on the main process before all others enter it, for instance to fill a cache."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run a `with` block on the main process of each machine before the others enter it."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if goes_first:  # after an error as well: the others must not hang
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split inputs between the processes within a `with` block, without any communication.

        Args:
            inputs (`list`, `tuple`, `torch.Tensor`, `datasets.Dataset` or `dict` of these): The inputs to split along the
                first dimension. The values of a dictionary must have the same length.
            apply_padding (`bool`): Pad short slices with the last input, so that all have the same length; needed
                when results are gathered. Tensors are then also moved to the device.

        Raises:
            TypeError: For inputs without a length.
            ValueError: For a dictionary whose values differ in length.

        Example:
            ```python
            with state.split_between_processes(["a", "b", "c"]) as prompts:
                print(prompts)  # ["a", "b"] on the first of two processes, ["c"] on the second
            ```
        """
        yield split(inputs, self.process_index, self.num_processes, apply_padding=apply_padding, device=self.device)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a process group, on all its processes; the default one, and with it all others, when None."""
        if self.fork_launched and group is None:  # the parent of forked processes destroys it
            return
        if dist.is_available() and dist.is_initialized():
            shutdown.close_process_group(group)

    # ---- decorators ---------------------------------------------------------------------------------------------

    @overload
    def on_main_process(self, function: Function) -> Function: ...

    @overload
    def on_main_process(self, function: None = None) -> Callable[[Function], Function]: ...

    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: only the main process runs the function, the others get None."""
        return _only_if(self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Function) -> Function: ...

    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Function], Function]: ...

    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: only the main process of each machine runs the function, the others get None."""
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: only the process of the highest rank runs the function, the others get None."""
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: only the process of that rank runs the function, the others get None.

        Args:
            function (`Callable`, *optional*): The function; left out in `@state.on_process(process_index=2)`.
            process_index (`int`): The rank.

        Raises:
            ValueError: When `process_index` is missing.
        """
        return _only_if(self.process_index == _given("process_index", process_index), function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: only the process of that local rank on each machine runs the function, the others get None.

        Args:
            function (`Callable`, *optional*): The function; left out in `@state.on_local_process(...)`.
            local_process_index (`int`): The local rank.

        Raises:
            ValueError: When `local_process_index` is missing.
        """
        return _only_if(self.local_process_index == _given("local_process_index", local_process_index), function)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


@known_as("accelerate.state.PartialState")
class PartialState(ProcessPlace):
    """The rank of this process, the world size, and the device of this process.

    All instances share one state. The first one finds rank and world size and, where a launcher started several processes,
    starts the process group; later ones ignore their arguments.

    Args:
        cpu (`bool`): Compute on the CPU even where there is an accelerator; so does `ACCELERATE_USE_CPU`.
        kwargs: Arguments of `torch.distributed.init_process_group`, such as `backend` and `timeout`. Without effect
            in a single process, and when the default group already exists, which is then used.

    Raises:
        TypeError: For keyword arguments that `init_process_group` does not take.
        ValueError: For a backend or device that is not available, or if MASTER_ADDR is not set.

    Example:
        ```python
        state = PartialState()
        print(f"process {state.process_index} of {state.num_processes} on {state.device}")
        ```
    """

    _shared_state: ClassVar[Any] = SharedDict()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        kwargs.pop("_use_sagemaker", None)  # transformers passes it; the environment says it as well
        options = process_group.check_group_options(kwargs)
        try:
            self._find_ranks(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), options)
        except BaseException:
            self._shared_state.clear()
            raise

    @property
    def initialized(self) -> bool:
        """True once an instance has been created (and not been reset since)."""
        return self._shared_state != {}

    @property
    def default_device(self) -> torch.device:
        """The device of a program of one process, whatever the arguments of this state were."""
        return default_device()

    @property
    def mixed_precision(self) -> NoReturn:
        """Not known before there is an `Accelerator`, whose state has it.

        Raises:
            AttributeError: Always, with where to read it.
        """
        raise AttributeError(
            "`PartialState` object has no attribute 'mixed_precision': it knows the processes and their devices. Read "
            "`accelerator.mixed_precision`, or `AcceleratorState().mixed_precision` once there is an `Accelerator`."
        )

    def set_device(self) -> None:
        """Choose this process's device and make it the current one."""
        kind = self._kind()
        override = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if override is not None:
            self.device = torch.device(override)
        else:
            # the devices' own backend would raise for two processes on one
            shares = str(kind.collective_backend) not in (self.backend or "")
            self.device = kind.device(kind.index_of(self.local_process_index, shares) if self.backend else None)
        kind.set_device(self.device.index)

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the shared state, so that the next instance is initialized again; a process group is not changed."""
        cls._shared_state.clear()

    # ---- initialization, once -----------------------------------------------------------------------------------

    def _find_ranks(self, cpu: bool, options: dict[str, Any]) -> None:
        self._cpu = cpu
        self.debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED")
        self.backend = None
        self.distributed_type = DistributedType.NO
        self.num_processes, self.process_index, self.local_process_index = 1, 0, 0

        kind = self._kind()
        rank_info = kind.own_place() or detect_cluster(os.environ)
        exists = dist.is_available() and dist.is_initialized()
        began = None if exists else time.time_ns()
        if exists:
            rank_info = _rank_info_of_group(rank_info)
        if rank_info is not None:
            self.num_processes, self.process_index = rank_info.world_size, rank_info.rank
            self.local_process_index = rank_info.local_rank
            supervision.report_to_launcher(self.process_index)
        if exists:
            self.backend = dist.get_backend()
            self.set_device()
        elif rank_info is not None and (rank_info.world_size > 1 or rank_info.master_addr is not None):
            self._start_group(kind, rank_info, options)
        else:
            if rank_info is None:
                check_alone(os.environ)
            self.set_device()
        if self.backend is not None:
            supervision.report_met()
            for observer in observers():
                observer.begin(began)
        if self.backend is not None or kind.always_distributed:
            self.distributed_type = self._distributed_type()
        asked_for = cpu or "ACCELERATE_TORCH_DEVICE" in os.environ
        if kind.name == "cpu" and not asked_for and self.is_local_main_process:
            _warn_of_unused_gpus()  # on each machine: what hides its GPUs may be missing on that of the main process
        if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
            from accel_state.numa import set_numa_affinity

            set_numa_affinity(self.local_process_index)

    def _start_group(self, kind: DeviceKind, rank_info: ClusterPlace, options: dict[str, Any]) -> None:
        """Start the process group, after checking everything that could be wrong."""
        if kind.collective_backend is None:
            warn_user(
                f"{kind.name!r} devices have no backend for collectives, so the {rank_info.world_size} processes "
                "compute on the CPU. Start one process to use the device, or pass cpu=True."
            )
            kind = device_kind("cpu")
        process_group.check_distributed(rank_info)
        self.backend, _ = self._prepare_backend(self._cpu, False, options.get("backend"))
        if self.backend is None:  # says a replacement: every process trains by itself
            self.num_processes, self.process_index, self.local_process_index = 1, 0, 0
            self.set_device()
            return
        process_group.check_backend(self.backend, kind)
        self.set_device()
        if kind.before_group is not None and rank_info.world_size > 1:
            kind.before_group()
        for observer in observers():
            observer.prepare()
        process_group.start_process_group(rank_info, self.backend, options)
        if kind.name == "cpu":
            process_group.split_cpu_threads(rank_info.local_world_size)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """The backend of the process group to start, and the distributed type. Other libraries monkeypatch this method.

        Of `sagemaker_dp` the environment says more. `backend` is what the program asks for.
        """
        kind = device_kind("cpu") if cpu else self._kind()
        if kind.collective_backend is None:
            kind = device_kind("cpu")
        place = kind.own_place() or detect_cluster(os.environ)
        if place is None:
            return backend, DistributedType.NO
        return process_group.choose_backend(kind, place, backend), kind.distributed_type

    def _kind(self) -> DeviceKind:
        """The kind of this process's device."""
        override = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if override is not None:
            kind = kind_of(torch.device(override))
        else:
            kind = device_kind("cpu") if self._cpu else detect_device_kind()
        if kind.collective_backend is None and self.backend is not None:
            return device_kind("cpu")
        return kind

    def _distributed_type(self) -> DistributedType:
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):  # chosen before any plugin is created
            return DistributedType.DEEPSPEED
        return self._kind().distributed_type


def _warn_of_unused_gpus() -> None:
    """Warn that this process computes on the CPU of a machine that has GPUs; where they are hidden on purpose, log it."""
    missing = explain_missing_gpus()
    if missing is None:
        return
    message = f"Computing on the CPU, although this machine has {missing.gpus}: {missing.reason}."
    if missing.on_purpose:
        logger.info(message)
    else:
        warn_user(
            f"{message} {missing.advice}; to compute on the CPU without this warning, pass cpu=True or set "
            "ACCELERATE_USE_CPU=1."
        )


def kind_of(device: torch.device) -> DeviceKind:
    """The row of a device; that of the CPU for those without a row of their own, such as "meta"."""
    kinds = device_kinds()
    return next((kind for kind in kinds if kind.name == device.type), kinds[-1])


def _rank_info_of_group(announced: ClusterPlace | None) -> ClusterPlace:
    """Rank and world size of this process in a process group that the program started itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if announced is not None and (announced.rank, announced.world_size) == (rank, world_size):
        return announced
    local_rank = get_int_from_env(["LOCAL_RANK"], rank)
    return ClusterPlace("torch.distributed", rank, world_size, local_rank, world_size)


def _only_if(chosen: bool, function: Any) -> Any:
    if function is None:  # called with arguments: what is returned is the decorator
        return partial(_only_if, chosen)
    if chosen:
        return function

    @wraps(function)  # so that registries and timers which read the name see the same one on all ranks
    def skip(*args: Any, **kwargs: Any) -> None:
        return None

    return skip


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} is missing: pass the process that runs the function, as in {name}=0.")
    return value
