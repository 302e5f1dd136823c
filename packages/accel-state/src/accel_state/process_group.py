"""Starting the default process group, and choosing its backend."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_state import shutdown
from accel_state.clusters import ClusterPlace, cluster_row
from accel_state.devices import DeviceKind
from accel_state.environment import parse_flag_from_env
from accel_state.errors import MissingLibraryError, missing_library
from accel_state.interfaces import INTERFACE_VARIABLE, interface_to
from accel_state.libraries import is_installed
from accel_state.long_wait import LongWait

logger = logging.getLogger("accelerate.state")

UNDECIDED = (None, "nccl")  # "nccl" is the default of `InitProcessGroupKwargs`, whatever the device


def check_group_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check keyword arguments of `torch.distributed.init_process_group`, and return those that are not None.

    Raises:
        TypeError: Naming the unknown ones and those allowed.
    """
    if not options or not dist.is_available():  # without torch.distributed no group will be started
        return {}
    parameters = inspect.signature(dist.init_process_group).parameters
    allowed = [name for name in parameters if not name.startswith("_")]
    # A library may have replaced torch's function by one that passes its arguments on.
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = sorted(set(options) - set(allowed))
    if unknown and not takes_any:
        raise TypeError(
            f"Unknown keyword arguments {', '.join(map(repr, unknown))}: init_process_group takes {', '.join(allowed)}."
        )
    timeout = options.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} is not a datetime.timedelta: pass one, such as timedelta(seconds=1800).")
    return {name: value for name, value in options.items() if value is not None}


def check_distributed(rank_info: ClusterPlace) -> None:
    """Raise when this build of torch cannot connect processes.

    Raises:
        RuntimeError: It has no `torch.distributed`.
    """
    if not dist.is_available():
        raise RuntimeError(
            f"Rank {rank_info.rank} of {rank_info.world_size} cannot join a process group: this torch was built without "
            "torch.distributed. Install another build of torch, or start one process."
        )


def choose_backend(kind: DeviceKind, rank_info: ClusterPlace, wanted: str | None) -> str:
    """The backend for a group of processes on devices of that kind.

    Args:
        kind: The device kind, which must have a backend of its own.
        rank_info: Rank and world size of this process, and who set them.
        wanted: The backend that the user asked for; None and `"nccl"` mean the default of the device.
    """
    assert kind.collective_backend is not None
    if wanted not in UNDECIDED:
        return wanted
    on_sagemaker = parse_flag_from_env("ACCELERATE_USE_SAGEMAKER")
    if on_sagemaker and os.environ.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "NO") != "NO":
        return "smddp"
    row = cluster_row(rank_info.cluster)
    if kind.name == "cpu" and row is not None and row.collective_backend and dist.is_mpi_available():
        return row.collective_backend
    if kind.name != "cpu" and _uses_cpu_tensors():
        return f"cpu:gloo,{kind.name}:{kind.collective_backend}"
    return kind.collective_backend


def _uses_cpu_tensors() -> bool:
    """Whether FSDP may run collectives on CPU tensors too: parameters are offloaded, or full state dicts are."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and (
        parse_flag_from_env("FSDP_OFFLOAD_PARAMS") or os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
    )


def check_backend(backend: str, kind: DeviceKind) -> None:
    """Raise an error for a backend that this installation lacks, before anything starts.

    Args:
        backend: A name, or one per device type as in `"cpu:gloo,cuda:nccl"`.
        kind: The device kind whose library may bring the backend.

    Raises:
        MissingLibraryError: When a library that is not installed provides it.
        ValueError: When torch does not know it.
    """
    if backend == "smddp":
        if not is_installed("smdistributed"):
            raise missing_library("smdistributed-dataparallel", why="Data parallel training on SageMaker")
        __import__("smdistributed.dataparallel.torch.torch_smddp")
    kind.load_backend()
    for entry in backend.lower().split(","):
        name = entry.rpartition(":")[2]
        if dist.is_backend_available(name):
            continue
        known = sorted(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
        advice = f"Use one of {', '.join(known)}"
        if name == kind.collective_backend:
            if kind.library is not None:
                raise MissingLibraryError(
                    f"The backend {name!r} for {kind.name!r} devices comes with {kind.library}, "
                    "which did not register it: check that installation, or pass cpu=True.",
                    name=kind.library,
                )
            advice += f", pass cpu=True, or install a build of torch with {name}"
        raise ValueError(f"backend={backend!r} is not available in this installation of torch. {advice}.")


def start_process_group(rank_info: ClusterPlace, backend: str, options: Mapping[str, Any]) -> None:
    """Start the default process group and have it shut down before the interpreter ends.

    Args:
        rank_info: Rank and world size of this process; also written to torchrun's variables, for libraries that read those.
        backend: A backend that passed `check_backend`.
        options: Further arguments of `torch.distributed.init_process_group`.

    Raises:
        ValueError: When MASTER_ADDR is needed and not set.
    """
    arguments = {name: value for name, value in options.items() if name != "backend"}
    waits_for_rank_0 = False
    if backend == "xla":
        arguments.setdefault("init_method", "xla://")
    else:
        arguments.setdefault("rank", rank_info.rank)
        arguments.setdefault("world_size", rank_info.world_size)
        finds_others = "init_method" in arguments or "store" in arguments or backend == "mpi"
        if rank_info.master_addr is None and not finds_others:
            raise ValueError(
                f"Rank {rank_info.rank} of {rank_info.world_size} (set by {rank_info.cluster}) cannot join the process group: "
                "MASTER_ADDR is not set. Set it to the address of the machine of rank 0, the same for all "
                "processes (127.0.0.1 on one machine), or start them with `accelerate launch` or torchrun."
            )
        # For libraries that read the variables of torchrun, whoever has started this process.
        os.environ.update(rank_info.torch_variables())
        if "gloo" in backend:
            _choose_interface(rank_info.master_addr)
        own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        waits_for_rank_0 = rank_info.rank > 0 and not finds_others and own_store
    wait = LongWait(lambda text: logger.warning("Rank %d of %d: %s", rank_info.rank, rank_info.world_size, text))
    wait.begin(lambda: _absent(rank_info), _limit(backend, options).total_seconds())
    try:
        if waits_for_rank_0:
            _wait_for_rank_0(rank_info, _limit(backend, options))
        dist.init_process_group(backend, **arguments)
    finally:
        wait.end()
    # The default group of now is what is closed before the interpreter ends.
    shutdown.register()


def _choose_interface(master_addr: str | None) -> None:
    """Have gloo connect machines through the network interface by which rank 0 is reached, unless the user has chosen one.

    `accelerate launch` has done so already. Other launchers leave it to gloo, which takes the address of the host's name, often a
    loopback address: ranks would then look for the others on their own machine.
    """
    if INTERFACE_VARIABLE not in os.environ and (interface := interface_to(master_addr)) is not None:
        os.environ[INTERFACE_VARIABLE] = interface


def start_alone(kind: DeviceKind) -> None:
    """Start a default process group of this process alone, for libraries that need one.

    Args:
        kind: The kind of device that its tensors are on.
    """
    dist.init_process_group(kind.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    shutdown.register()


def _limit(backend: str, options: Mapping[str, Any]) -> timedelta:
    """How long ranks wait for one another when the group starts."""
    default = dist.constants.default_pg_nccl_timeout if backend == "nccl" else None
    limit: timedelta = options.get("timeout") or default or dist.default_pg_timeout
    return limit


def _absent(rank_info: ClusterPlace) -> str:
    """For whom this rank waits, as far as it can know; empty where another rank of this machine says the same."""
    if rank_info.rank > 0 and rank_info.master_addr is not None and not _rank_0_listens(rank_info):
        return f"rank 0 at {rank_info.master_addr}:{rank_info.master_port}"
    return "the other ranks" if rank_info.local_rank == 0 else ""


def _rank_0_listens(rank_info: ClusterPlace) -> bool:
    try:
        socket.create_connection((str(rank_info.master_addr), int(rank_info.master_port or 0)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _wait_for_rank_0(rank_info: ClusterPlace, limit: timedelta) -> None:
    """Wait until rank 0 listens, if there is no agent's store; torch would print a warning at each attempt."""
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline and not _rank_0_listens(rank_info):
        time.sleep(0.02)


def split_cpu_threads(local_world_size: int) -> None:
    """Split this machine's cores between its CPU processes, unless `OMP_NUM_THREADS` or `MKL_NUM_THREADS` is set.

    Otherwise each process would start one thread per core, and they would compete for the cores.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name, "0") != "0":
            return
    torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))
