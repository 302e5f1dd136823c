"""One process of a launch on Ray: what a worker of Ray Train runs, and the actor through which it talks to the launch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from accel_cli.launch.runners.local import killed_with
from accel_cli.launch.runners.signals import NOTICES
from accel_cli.supervise.watch import Watch

LOOK_SECONDS = 0.1
CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Process:
    """The command of every process.

    Attributes:
        words: The command; `python` stands for the Python of the worker.
        variables: Environment variables in addition to those of Ray.
        folder: Where it runs, if the machine has this folder; else where Ray runs the worker. None for the latter.
        quiet: Whether to report no failure.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    folder: str | None
    quiet: bool


class Mailbox:
    """An actor that takes output and exit codes to the launch, and its signals to the processes."""

    def __init__(self) -> None:
        self._news: list[tuple[str, int, Any]] = []
        self._arrival = asyncio.Event()
        self._signals: list[str] = []
        self._signal = asyncio.Condition()

    async def tell(self, kind: str, rank: int, content: Any = None) -> int:
        """Add a message for the launch: `began`, `stdout`, `stderr`, `failure` or `ended`.

        Returns:
            The number of signals so far.
        """
        self._news.append((kind, rank, content))
        self._arrival.set()
        return len(self._signals)

    async def read(self) -> list[tuple[str, int, Any]]:
        """Wait for messages, and return all of them."""
        await self._arrival.wait()
        news, self._news = self._news, []
        self._arrival.clear()
        return news

    async def send(self, name: str) -> None:
        """Send a signal to all processes."""
        async with self._signal:
            self._signals.append(name)
            self._signal.notify_all()

    async def signals(self, since: int, wait: bool = True) -> list[str]:
        """The names of the signals after the first `since`; by default, wait for one."""
        async with self._signal:
            if wait:
                await self._signal.wait_for(lambda: len(self._signals) > since)
            return self._signals[since:]


def run_process(config: dict[str, Any]) -> None:
    """Run the process of this worker in a child, whose main thread can take signals, and wait.

    Args:
        config: The entries `process` (a `Process`) and `mailbox` (the actor).

    Raises:
        ChildProcessError: The process failed, and the launch has not asked it to end. Ray Train restarts all, or none.
    """
    import ray

    process, mailbox = config["process"], config["mailbox"]
    rank = int(os.environ["RANK"])
    since = ray.get(mailbox.tell.remote("began", rank))
    port = _agree_on_port(rank)
    watch = Watch(None, process.quiet, lambda text: mailbox.tell.remote("failure", rank, text))
    environ = {**os.environ, **process.variables, **watch.variables, "MASTER_PORT": str(port)}
    code: int | None = None
    try:
        code = _run(process, environ, mailbox, rank, since, watch)
    finally:
        crashed = bool(watch.crashed)
        watch.close({} if code is None else {rank: code})
    ray.get(mailbox.tell.remote("ended", rank, (code, crashed)))
    is_asked = set(ray.get(mailbox.signals.remote(since, False))) - set(NOTICES)
    if code and not is_asked:
        raise ChildProcessError(f"rank {rank} ended with code {code}")


def _agree_on_port(rank: int) -> int:
    """A free port of rank 0's machine, for the processes: that of the workers stays in use. All ranks have begun then."""
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("", 0))
        ports: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(ports, probe.getsockname()[1])
    return ports[0]


def _run(process: Process, environ: dict[str, str], mailbox: Any, rank: int, since: int, watch: Watch) -> int:
    import ray

    python, *rest = process.words
    words = [sys.executable if python == "python" else python, *rest]
    folder = process.folder if process.folder and os.path.isdir(process.folder) else None
    die_with_us = killed_with(os.getpid())

    def in_new_process() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it in what it starts
        if die_with_us is not None:
            die_with_us()

    with subprocess.Popen(
        words, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=in_new_process,
    ) as child:  # fmt: skip
        readers = [
            threading.Thread(target=_pass_on, args=(stream, name, mailbox, rank), daemon=True)
            for name, stream in (("stdout", child.stdout), ("stderr", child.stderr))
        ]
        for reader in readers:
            reader.start()
        arrival = mailbox.signals.remote(since)
        while child.poll() is None:
            watch.look()
            if ray.wait([arrival], timeout=LOOK_SECONDS)[0]:
                names = ray.get(arrival)
                since += len(names)
                arrival = mailbox.signals.remote(since)
                for name in names:
                    child.send_signal(signal.Signals[name])
        for reader in readers:
            reader.join()
        return child.wait()


def _pass_on(stream: IO[bytes], name: str, mailbox: Any, rank: int) -> None:
    """Pass whole lines on, each after the one before has arrived: the actor takes calls in any order."""
    import ray

    rest = b""
    while chunk := os.read(stream.fileno(), CHUNK_BYTES):
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end:
            ray.get(mailbox.tell.remote(name, rank, rest + chunk[:end]))
            rest = b""
        rest += chunk[end:]
    if rest:
        ray.get(mailbox.tell.remote(name, rank, rest))
