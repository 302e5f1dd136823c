"""Closing process groups cleanly, so that a process that has finished does not abort at interpreter shutdown.

The collectives of a gloo group run in threads of the group. After a collective has returned, its thread may still have
to release Python objects (tensors, callbacks of communication hooks), for which it needs the interpreter's lock. If it
gets to that only after the interpreter has begun to shut down, CPython stops the thread by unwinding its stack, C++ forbids
unwinding through a destructor, and the process aborts: "terminate called without an active exception". Neither a
barrier nor `destroy_process_group` helps: models and work handles keep the group, and with it the threads, alive.

So before the interpreter shuts down, every thread of every gloo group is made to release its Python objects.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

SECONDS_AT_CLOSE = 5.0
SECONDS_AFTER_AN_ERROR = 1.0
SECONDS_TO_RELEASE = 0.5

_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # groups, also those destroyed by hand that a model keeps alive
_spent: list[list[Any]] = []  # what the groups closed since the last default group have left, with their connections
_spent_before: list[list[Any]] = []
_callbacks: list[weakref.ref[Callable[[], None]]] = []
_registered_in: int | None = None  # a process id, because forked processes inherit the rest, but not the threads


def register() -> None:
    """Have process groups closed before the interpreter shuts down; may be called again, once a default group exists."""
    global _registered_in
    import torch.distributed as dist

    if dist.is_initialized():
        _watched.add(dist.group.WORLD)
        _free_what_is_spent()
    if _registered_in is None:
        atexit.register(_close_at_exit)
    _registered_in = os.getpid()


def on_close(callback: Callable[[], None]) -> None:
    """Have `callback` called before the default group closes, unless the process ends because of an error.

    Args:
        callback: Held weakly: a bound method does not keep its object alive. It must not wait for other processes.
    """
    bound = hasattr(callback, "__self__")
    _callbacks.append(weakref.WeakMethod(callback) if bound else weakref.ref(callback))


def close_process_group(group: Any = None) -> None:
    """Destroy a process group without waiting for other processes, so that it cannot hang when one has exited.

    Args:
        group: The group; the default one, and with it all others, when None.
    """
    import torch.distributed as dist

    if group is None or group == dist.group.WORLD:
        _call_back()
        groups = _open_groups()
    else:
        groups = [group]
    for each in groups:
        drain(each)
    dist.destroy_process_group(group)


def _close_at_exit() -> None:
    if os.getpid() != _registered_in:
        return
    import torch.distributed as dist

    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    if not failed:
        _call_back()
    seconds = SECONDS_AFTER_AN_ERROR if failed else SECONDS_AT_CLOSE  # the others wait for a failed process to end
    for group in _open_groups():
        drain(group, seconds)
    if dist.is_initialized() and not failed:  # other libraries than gloo might wait for the others
        dist.destroy_process_group()


def _call_back() -> None:
    while _callbacks:
        callback = _callbacks.pop()()
        if callback is not None:
            callback()


def _open_groups() -> list[Any]:
    from torch.distributed import distributed_c10d

    return list({*distributed_c10d._world.pg_map, *_watched})


# ---- draining ---------------------------------------------------------------------------------------------------


def drain(group: Any, seconds: float = SECONDS_AT_CLOSE) -> bool:
    """Wait until no thread of a group's gloo backend has any Python object left to release.

    It communicates nothing, and the group cannot be used afterwards: the processes no longer agree on the number of
    collectives.

    Args:
        group: A `torch.distributed.ProcessGroup`; one without gloo needs no draining.
        seconds: How long to wait for threads that are still in a collective.

    Returns:
        False on timeout, because another process does not take part in a collective. The group then stays alive
        until the process exits, even if it is destroyed: joining its threads would mean waiting for that process.
    """
    done = all([_drain_backend(backend, seconds) for backend in _gloo_backends(group)])
    if not done:
        _keep_for_ever(group)
    return done


def _gloo_backends(group: Any) -> Iterator[Any]:
    import torch.distributed as dist

    gloo = getattr(dist, "ProcessGroupGloo", None)  # missing in builds without gloo
    if gloo is None or not hasattr(group, "_device_types"):
        return
    seen: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        if isinstance(backend, gloo) and not any(backend is other for other in seen):
            seen.append(backend)
    yield from seen


class _Visit:
    """Called in a gloo thread when a collective ends there; holds the thread until all threads have been reached."""

    __slots__ = ("__weakref__", "arrived", "gate", "home")

    def __init__(self, arrived: queue.SimpleQueue[int], gate: queue.SimpleQueue[None]) -> None:
        self.arrived = arrived
        self.gate = gate
        self.home = threading.get_ident()

    def __call__(self, _: Any) -> None:
        here = threading.get_ident()
        self.arrived.put(here)
        if here != self.home:
            self.gate.get()


def _drain_backend(backend: Any, seconds: float) -> bool:
    """Make sure that every thread of a backend has finished all earlier work and holds no Python object.

    Each thread gets a collective that fails at once, before it communicates, and whose callback blocks until
    all threads are in such a callback: then all have finished their earlier work. What remains is to release the
    callbacks. A weak reference reports that from C code, so the thread releases the interpreter's lock
    without acquiring it again. Everything else that belongs to the failed collectives is kept, lest the
    threads hold the last reference: until the default group after the next, or for ever.
    """
    import torch
    import torch.distributed as dist

    failing: Any = dist.AllreduceOptions()
    failing.reduceOp = dist.ReduceOp.BAND  # not defined for floats
    tensors = [torch.zeros(1)]
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    gate: queue.SimpleQueue[None] = queue.SimpleQueue()
    released: queue.SimpleQueue[Any] = queue.SimpleQueue()
    kept: list[Any] = [tensors]
    num_threads = backend.options._threads

    def visit() -> None:
        work = backend.allreduce(tensors, failing)
        future = work.get_future()
        callback = _Visit(arrived, gate)
        kept.extend((work, future, weakref.ref(callback, released.put)))
        future.add_done_callback(callback)

    num_visits, num_held = num_threads, 0
    try:
        for _ in range(num_threads):
            visit()
        while num_held < num_threads:
            if arrived.get(timeout=seconds) == threading.get_ident():  # it had failed before the callback was added
                visit()
                num_visits += 1
            else:
                num_held += 1
    except queue.Empty:  # what follows is then done by the threads that are left
        seconds = min(seconds, SECONDS_TO_RELEASE)
    finally:
        _keep_for_ever(kept)
    for _ in range(num_threads):
        gate.put(None)
    try:
        for _ in range(num_visits):
            released.get(timeout=seconds)
    except queue.Empty:
        return False
    if num_held < num_threads:
        return False
    _spent.append(kept)
    return True


def _free_what_is_spent() -> None:
    """Free what was left before the last default group; its store is asked by other ranks until this one begins."""
    global _spent, _spent_before
    if os.getpid() != _registered_in:  # in a forked process the threads are missing that freeing would wait for
        _spent_before = _spent = []
    for each in _spent_before:
        each.clear()
    _spent, _spent_before = [], _spent


def _keep_for_ever(thing: Any) -> None:
    """Keep an object alive, even through interpreter shutdown."""
    with contextlib.suppress(AttributeError):  # interpreters without the C interface
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
