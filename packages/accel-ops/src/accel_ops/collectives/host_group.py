"""A gloo group beside one that takes tensors of accelerators only.

What hosts tell each other - sizes, Python objects, batches in CPU memory - goes through it: a host that sent them over the
accelerator's group would wait for all work of its device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accel_ops.collectives.outcomes import group_timeout
from accel_state.environment import patch_environment
from accel_state.interfaces import INTERFACE_VARIABLE, interface_to
from accel_state.warning import warn_user

_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def host_group(group: Any = None) -> Any:
    """The process group for tensors in CPU memory of the ranks of another one.

    The first call for a group is a collective of all its ranks, unless it takes CPU tensors itself.

    Args:
        group: The process group; the default one when None.

    Returns:
        The group itself if it takes CPU tensors, a gloo group of the same ranks if not; None where gloo cannot be had.
    """
    group = dist.group.WORLD if group is None else group
    if group not in _groups:
        takes_cpu = torch.device("cpu") in group._device_types
        _groups[group] = group if takes_cpu else new_host_group(group)
    return _groups[group]


def new_host_group(group: Any) -> Any:
    """A further gloo group of the ranks of a process group, for collectives that must not get between others.

    A collective of all its ranks. None, after a warning, where gloo cannot be had.
    """
    if not dist.is_gloo_available():
        return None
    is_world = group == dist.group.WORLD
    try:
        with _interface_to_rank_0():
            return dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=max(timedelta(seconds=group_timeout(group)), dist.default_pg_timeout),
                backend="gloo",
                use_local_synchronization=not is_world,
                group_desc="host",
            )
    except RuntimeError as error:
        warn_user(
            f"The hosts cannot talk to each other through gloo ({error}), so every gather waits for the device. Set "
            f"{INTERFACE_VARIABLE} to the network interface that connects the machines."
        )
        return None


@contextmanager
def _interface_to_rank_0() -> Iterator[None]:
    """Have gloo use the network interface through which rank 0 is reached.

    Of its own it uses the address of the host's name, which on many machines is that of the loopback interface.
    """
    interface = None if INTERFACE_VARIABLE in os.environ else interface_to(os.environ.get("MASTER_ADDR"))
    with patch_environment(**({INTERFACE_VARIABLE: interface} if interface else {})):
        yield
