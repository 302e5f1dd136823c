"""`PartialState`: which process this is, of how many, on which device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from accel_state import process_group, shutdown, supervision
from accel_state.clusters import ClusterPlace, detect_cluster
from accel_state.devices import DeviceKind, default_device, detect_device_kind, device_kind, device_kinds
from accel_state.enums import DistributedType
from accel_state.environment import get_int_from_env, parse_flag_from_env
from accel_state.numa import set_numa_affinity
from accel_state.public_names import known_as
from accel_state.shared import SharedDict, fact
from accel_state.splitting import split
from accel_state.warning import warn_user

Function = TypeVar("Function", bound=Callable[..., Any])


def is_initialized() -> bool:
    """True when this process has found its place, that is, once a `PartialState` was made."""
    return PartialState._shared_state != {}


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing: what the `on_..._process` decorators leave to the other processes."""


class ProcessPlace:
    """What follows from a process's place; the base of the two states, which share nothing else."""

    backend: str | None = fact("The collective library, as 'nccl' or 'gloo'; None without a process group.")
    debug: bool = fact("Whether collectives compare shapes first (`ACCELERATE_DEBUG_MODE`).")
    device: torch.device = fact("Where to put models and batches; `ACCELERATE_TORCH_DEVICE` overrides the choice.")
    distributed_type: DistributedType = fact("How the run is spread over processes; `NO` for a single one.")
    local_process_index: int = fact("The rank of this process on its machine, from 0.")
    num_processes: int = fact("How many processes there are, over all machines.")
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

    # ---- together -----------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Go on only when all processes have come here.

        After the process group has ended (`Accelerator.end_training`) there is nobody to wait for: this warns and goes
        on, so that a script which only then saves its model does not lose it.

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
                f"wait_for_everyone() on process {self.process_index} waits for nobody, because the process group has "
                "ended. Call it before end_training() or destroy_process_group(), which belong at the very end."
            )
            return
        kind_of(self.device).barrier(self.device.index)
        supervision.report_progress()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main process run a `with` block before all others enter it, for instance to fill a cache."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the main process of each machine run a `with` block before the others enter it."""
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
        """Give each process its part of the inputs, within a `with` block; nothing is communicated.

        Args:
            inputs (`list`, `tuple`, `torch.Tensor`, `datasets.Dataset` or `dict` of these): What to divide, along the
                first dimension. The values of a dictionary must have the same length.
            apply_padding (`bool`): Fill short parts up with the last input, so that all have the same length; needed
                when results are gathered. Tensors are then also moved to the device.

        Raises:
            TypeError: For something that has no length.
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
        """End a process group, on all its processes together; the default one, and with it all, when None."""
        if self.fork_launched and group is None:  # the parent of forked processes ends it
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
        """Decorator: only the process of that number on each machine runs the function, the others get None.

        Args:
            function (`Callable`, *optional*): The function; left out in `@state.on_local_process(...)`.
            local_process_index (`int`): The rank on its machine.

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
    """Which process this is, of how many, and on which device it computes.

    All instances share one state. The first one finds the place and, where a launcher started several processes,
    starts the process group; later ones find everything settled and ignore their arguments.

    Args:
        cpu (`bool`): Compute on the CPU even where there is an accelerator; so does `ACCELERATE_USE_CPU`.
        kwargs: Arguments of `torch.distributed.init_process_group`, such as `backend` and `timeout`. Without effect
            in a single process, and when the group exists already: it is adopted as it is.

    Raises:
        TypeError: For keyword arguments that a process group does not take.
        ValueError: For a backend or device that is not there, or an address that nobody gave.

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
            self._find_place(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), options)
        except BaseException:
            self._shared_state.clear()
            raise

    @property
    def initialized(self) -> bool:
        """True once an instance has been made (and not been reset since)."""
        return self._shared_state != {}

    @property
    def default_device(self) -> torch.device:
        """The device a program without several processes would compute on, whatever this state was told."""
        return default_device()

    def set_device(self) -> None:
        """Choose this process's device and make it the current one."""
        kind = self._kind()
        override = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if override is not None:
            self.device = torch.device(override)
        else:
            self.device = kind.device(kind.index_of(self.local_process_index) if self.backend else None)
        kind.set_device(self.device.index)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything, so that the next instance starts anew; a process group stays as it is."""
        cls._shared_state.clear()

    # ---- finding the place, once --------------------------------------------------------------------------------

    def _find_place(self, cpu: bool, options: dict[str, Any]) -> None:
        self._cpu = cpu
        self.debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED")
        self.backend = None
        self.distributed_type = DistributedType.NO
        self.num_processes, self.process_index, self.local_process_index = 1, 0, 0

        kind = self._kind()
        place = kind.own_place() or detect_cluster(os.environ)
        exists = dist.is_available() and dist.is_initialized()
        if exists:
            place = _place_in_group(place)
        if place is not None:
            self.num_processes, self.process_index = place.world_size, place.rank
            self.local_process_index = place.local_rank
            supervision.report_to_launcher(self.process_index)
        if exists:
            self.backend = dist.get_backend()
            self.set_device()
        elif place is not None and (place.world_size > 1 or place.master_addr is not None):
            self._start_group(kind, place, options)
        else:
            self.set_device()
        if self.backend is not None or kind.always_distributed:
            self.distributed_type = self._distributed_type()
        if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
            set_numa_affinity(self.local_process_index)

    def _start_group(self, kind: DeviceKind, place: ClusterPlace, options: dict[str, Any]) -> None:
        """Start the process group; whatever can be wrong is found before anything starts."""
        if kind.collective_backend is None:
            warn_user(
                f"{kind.name!r} devices cannot exchange data between processes, so the {place.world_size} processes "
                "compute on the CPU. Start one process to use the device, or pass cpu=True."
            )
            kind = device_kind("cpu")
        self.backend = process_group.choose_backend(kind, place, options.get("backend"))
        process_group.check_backend(self.backend, kind)
        self.set_device()
        if kind.before_group is not None and place.world_size > 1:
            kind.before_group()
        process_group.start_process_group(place, self.backend, options)
        if kind.name == "cpu":
            process_group.share_cpu_threads(place.local_world_size)

    def _kind(self) -> DeviceKind:
        """The kind of device that this process computes on."""
        override = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if override is not None:
            kind = kind_of(torch.device(override))
        else:
            kind = device_kind("cpu") if self._cpu else detect_device_kind()
        if kind.collective_backend is None and self.backend is not None:
            return device_kind("cpu")
        return kind

    def _distributed_type(self) -> DistributedType:
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):  # asked for before any plugin is made
            return DistributedType.DEEPSPEED
        return self._kind().distributed_type


def kind_of(device: torch.device) -> DeviceKind:
    """The row of a device; that of the CPU for those without a row of their own, such as "meta"."""
    kinds = device_kinds()
    return next((kind for kind in kinds if kind.name == device.type), kinds[-1])


def _place_in_group(announced: ClusterPlace | None) -> ClusterPlace:
    """The place of this process in the process group that somebody else started."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if announced is not None and (announced.rank, announced.world_size) == (rank, world_size):
        return announced
    local_rank = get_int_from_env(["LOCAL_RANK"], rank)
    return ClusterPlace("torch.distributed", rank, world_size, local_rank, world_size)


def _only_if(chosen: bool, function: Any) -> Any:
    if function is None:  # called with arguments: what is returned is the decorator
        return partial(_only_if, chosen)
    return function if chosen else do_nothing


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} is missing: say which process is to run the function, as in {name}=0.")
    return value
