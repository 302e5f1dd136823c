"""The launches of a run on several machines compare what they were told, and learn until their processes have met when another ends."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

LOOK_SECONDS = 1.0
LOST_SECONDS = 20.0  # without a sign of life from another machine's launch
MOST_SECONDS = 600.0  # processes without an `Accelerator` do not say that they have met: they give up after this time
PART_SECONDS, PART_LOOK_SECONDS = 10.0, 0.05  # for the launches of the other machines to end, after success
CONNECT_SECONDS = 60.0  # torch asks DNS first for the names of both ends
PREFIX = "accelerate_meeting"
FAULT = "fault"
WHILE = "while the run was starting, which cannot begin without it."
LEFT = "left"  # how many launches have succeeded and need the store no more
TOLD = "told"  # what the first launch was told, with which all others compare


class Meeting:
    """Signs of life of all launches, in the key-value store of machine 0's launch. That one looks at them for all.

    A process group waits for ranks that never come as long as its timeout, without a message.

    Args:
        host: Name or address of machine 0.
        port: Of the rendezvous.
        machine: The rank of this machine; None where the rendezvous gives the ranks, and may replace machines.
        count: The number of machines.
        has_store: Whether the store is in this process.
        told: What all launches must have been told alike.
        has_met: Whether the processes of this machine have gone on together with the others'.
        end: Called with the reason, when the run cannot begin.

    Attributes:
        fault: Why the run cannot begin; empty if nothing is wrong.
    """

    def __init__(
        self, host: str, port: int, machine: int | None, count: int, *, has_store: bool, told: Mapping[str, str],
        has_met: Callable[[], bool], end: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._address, self._machine, self._count, self._told = (host, port), machine, count, dict(told)
        self._has_store = has_store
        self._has_met, self._end = has_met, end
        self._done = Event()
        self.fault = ""
        self._store: Any = None
        self._lifeline: socket.socket | None = None  # closed when machine 0's launch ends
        self._beats: dict[int, tuple[str, float]] = {}  # of each other machine, the last one and when it came
        self._began = time.monotonic()
        self._thread = Thread(target=self._run, name="meeting", daemon=True)

    def start(self) -> None:
        """Begin to tell the others, and to look at them, in a thread."""
        self._thread.start()

    def leave(self, status: int) -> None:
        """End, and tell the others how.

        Args:
            status: The exit status of this launch.
        """
        self._done.set()
        self._thread.join()
        with suppress(RuntimeError):  # machine 0's launch has ended, too
            if status and self._machine is not None and self._store is not None and not self._has_met():
                self._store.set(str(self._machine), f"ended with exit status {status}")
            if not status and self._store is not None:
                self._part()
        if self._lifeline is not None:
            self._lifeline.close()

    def _part(self) -> None:
        """On the machine whose launch has the store, wait until the others need it no more: torch would print errors there."""
        left = self._store.add(LEFT, 1)
        deadline = time.monotonic() + PART_SECONDS
        while self._has_store and left < self._count and time.monotonic() < deadline:
            time.sleep(PART_LOOK_SECONDS)
            left = self._store.add(LEFT, 0)

    def absent(self) -> str:
        """Which machines' launches have not come yet, in words; empty if all are there."""
        if self._store is None and self._machine != 0:
            return "the launch of machine 0 at {}:{}".format(*self._address)
        if self._machine is None:
            return f"the launches of the other machines, {self._count} in all"
        others = [str(machine) for machine in range(1, self._count) if machine != self._machine]
        absent = [machine for machine in others if self._store is None or not self._store.check([machine])]
        return f"the launch of machine {', '.join(absent)}" if absent else ""

    def _run(self) -> None:
        with suppress(RuntimeError, OSError):  # nothing of ours answers there: torch says what is wrong
            if not self._connect():
                return
            if fault := self._contradiction():
                self._store.set(FAULT, fault)
                self._done.wait(2 * LOOK_SECONDS)  # in which the others read it
                with suppress(RuntimeError):  # machine 0's launch has read it and ended, and its store with it
                    self._store.delete_key(FAULT)  # which one that comes later must not read
                self._fail(fault)
            else:
                self._follow()

    def _follow(self) -> None:
        """Look at the others until the processes have met."""
        while not (self._has_met() or time.monotonic() - self._began > MOST_SECONDS):
            fault = self._look()
            # A launch that ends with all others, or after the ranks have met, is no fault.
            if fault and not self._done.wait(LOOK_SECONDS) and not self._has_met():
                self._fail(fault)
                return
            if self._done.wait(LOOK_SECONDS):
                return

    def _fail(self, fault: str) -> None:
        self.fault = fault
        self._end(fault)

    def _contradiction(self) -> str:
        """What this launch was told otherwise than the first one that came, or that another one has its rank; empty if nothing."""
        me = f"Machine {self._machine}" if self._machine is not None else f"The launch on {socket.gethostname()}"
        first, theirs = json.loads(self._store.compare_set(TOLD, "", json.dumps([me, self._told])))
        names = [name for name in {**theirs, **self._told} if theirs.get(name) != self._told.get(name)]
        if names:
            mine, other = (
                ", ".join(f"{name} {values.get(name) or 'unset'}" for name in names) for values in (self._told, theirs)
            )
            return (
                f"{me} was told {mine}; {first[:1].lower()}{first[1:]}: {other}. Give all machines the same settings."
            )
        if self._machine is not None:
            mine = f"{socket.gethostname()}, process {os.getpid()}"
            other = self._store.compare_set(f"launch of {self._machine}", "", mine).decode()
            if other != mine:
                return f"Two launches have --machine_rank {self._machine}: {other}, and {mine}. Each machine needs its own."
        return ""

    def _connect(self) -> bool:
        """Connect to the store of machine 0's launch, as soon as there is one; False if this one has ended before."""
        import torch.distributed as dist

        while self._lifeline is None:
            has_ended = self._done.is_set()  # once more then: the others must hear of it
            with suppress(OSError):
                self._lifeline = socket.create_connection(self._address, CONNECT_SECONDS)
            if self._lifeline is None:
                if has_ended:
                    return False
                self._done.wait(LOOK_SECONDS)
        self._lifeline.setblocking(False)
        # Tenants of one port in a process share the server, which lives as long as the last of them: the agent's ends before we do.
        store = dist.TCPStore(
            *self._address, is_master=self._has_store, multi_tenant=self._has_store, wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )  # fmt: skip
        self._store = dist.PrefixStore(PREFIX, store)
        return True

    def _look(self) -> str:
        """Give a sign of life, and return why the run cannot begin; empty if nothing is wrong."""
        try:
            if not self._is_closed():
                self._store.set(str(self._machine), str(time.monotonic()))
                fault = next(self._missing(), "") if self._machine == 0 else ""
                if fault:
                    self._store.set(FAULT, fault)
                return self._store.get(FAULT).decode() if self._store.check([FAULT]) else ""
        except RuntimeError:  # it was closed just now
            pass
        return "" if self._machine is None else f"Machine 0 has ended {WHILE}"

    def _is_closed(self) -> bool:
        assert self._lifeline is not None
        try:
            self._lifeline.recv(1)
        except BlockingIOError:  # open, and silent
            return False
        except OSError:
            pass
        return True

    def _missing(self) -> Iterator[str]:
        """What happened to each machine whose launch has ended, or has not been heard of for some time."""
        now = time.monotonic()
        for machine in range(1, self._count):
            if not self._store.check([str(machine)]):
                continue
            beat = self._store.get(str(machine)).decode()
            last, since = self._beats.get(machine, ("", now))
            if beat.startswith("ended"):
                yield f"Machine {machine} {beat} {WHILE}"
            elif beat != last:
                self._beats[machine] = (beat, now)
            elif now - since > LOST_SECONDS:
                yield f"Machine {machine} has given no sign of life for {LOST_SECONDS:.0f} s {WHILE}"
