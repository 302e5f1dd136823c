"""Gloo groups with one thread, because two can end the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Give each gloo group that is made in this block one thread. Without effect if torch was built without gloo.

    Torch gives a group two per network interface. Each seems to write the name of the collective that it has done into one C++
    string, without a lock: an all-gather of `torch.distributed._functional_collectives`, as DTensors have it, beside an all-reduce or an
    all-to-all that is under way in the same group ends the process after some 10,000 times ("malloc(): unaligned tcache chunk
    detected"; torch 2.9 and 2.13). The number of threads is an option of the group's class that `new_group` does not pass on.

    One thread does one collective after another: DDP, whose buckets are many all-reduces at a time, is better off with two.
    """
    if not dist.is_gloo_available():
        yield
        return
    gloo: Any = dist.ProcessGroupGloo
    start = gloo.__init__

    @wraps(start)
    def start_with_one_thread(
        group: Any, store: dist.Store, rank: int, size: int, options: Any = None, **named: Any
    ) -> None:
        if options is None or isinstance(options, timedelta):
            options = _one_thread(gloo, **{"timeout": options or dist.default_pg_timeout, **named})
            named = {}
        start(group, store, rank, size, options, **named)

    gloo.__init__ = start_with_one_thread
    try:
        yield
    finally:
        gloo.__init__ = start


def _one_thread(gloo: Any, timeout: timedelta, **others: Any) -> Any:
    """Torch's own options of a group, except for the number of threads."""
    options = gloo._Options()
    options._timeout = timeout
    for name, value in others.items():  # torch 2.15 has `enable_reconfigure`
        setattr(options, name, value)
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = (
        [gloo.create_device(interface=name) for name in names.split(",")] if names else [gloo.create_default_device()]
    )
    options._threads = 1
    return options
