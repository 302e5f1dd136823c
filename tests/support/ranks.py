"""Tests whose body runs in every rank of a real gloo group.

Worker processes start once per session and are used again; each test gets a fresh process group on a file store. A
failing or hanging body ends the workers, so the next test starts clean. They are forked from a process that has imported
what most tests need, and has done nothing else, because each of them would import for ten seconds.

`RANKS_SLOW=1` slows rank 1 down at every file of a test's folder, which shows who does not wait for the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.support.dtensor_caches import forget_meshes
from tests.support.leaks import gloo_threads, reset_state, restore_environment

TIMEOUT_SECONDS = float(os.environ.get("RANKS_TIMEOUT", "240"))
SLOW_RANK = os.environ.get("RANKS_SLOW")
SLOW_EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}
SLOW_SECONDS = 0.06
MOST_GROUPS = 24  # left in a worker by earlier tests, mostly of DeepSpeed; the threads of 130 take a fifth of a core
GRACE_SECONDS = 10.0  # how long the other ranks may go on once one has failed
IMPORTED_ONCE = ["accelerate.accelerator", "torch._dynamo", "torch.distributed.fsdp", "transformers", "deepspeed"]
ROOT = Path(__file__).resolve().parents[2]


def ranks(*worlds: int, timeout: float = TIMEOUT_SECONDS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test body on every rank of a gloo group, once for each size in `worlds`.

    The body must be a module-level function that takes `rank` and `world`; its other parameters are fixtures or
    parametrised values, pickled to the ranks. All ranks share one `tmp_path`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def test(**values: Any) -> None:
            POOL.run(body, values.pop("world", worlds[0]), values, timeout)

        kept = [p for name, p in signature.parameters.items() if name not in ("rank", "world")]
        if len(worlds) > 1:
            kept.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        del test.__wrapped__  # pytest must see the shortened signature
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test) if len(worlds) > 1 else test

    return decorate


class Pool:
    """Worker processes that wait for test bodies."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, body: Callable[..., None], world: int, values: dict[str, Any], timeout: float) -> None:
        if any(gloo_threads(process.pid) > MOST_GROUPS for process, _ in self.workers):
            self.close(politely=True)
        self._grow(world)
        workers = self.workers[:world]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((body.__module__, body.__name__, rank, world, folder, values))
            replies = self._collect(workers, timeout, Path(folder))
            failed = {rank: text + _printed(Path(folder), rank) for rank, text in replies.items() if text is not None}
        if failed:
            self.close()
            report = "\n".join(f"--- rank {rank} of {world} ---\n{text}" for rank, text in failed.items())
            pytest.fail(report, pytrace=False)

    def _collect(self, workers: list[tuple[Any, Connection]], timeout: float, folder: Path) -> dict[int, str | None]:
        """One entry per rank, the first failure first; None means that the body passed."""
        replies: dict[int, str | None] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                replies |= {rank: self._stack(workers[rank][0], rank, folder) for rank in pending.values()}
                break
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    replies[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    workers[rank][0].join(5)
                    replies[rank] = f"the process died with exit code {workers[rank][0].exitcode}\n"
                if replies[rank] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    @staticmethod
    def _stack(process: Any, rank: int, folder: Path) -> str:
        """Where a rank that does not answer hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        file = folder / f"stack_{rank}"
        end = time.monotonic() + 3
        while time.monotonic() < end and not (file.exists() and file.stat().st_size):
            process.join(0.05)
        return "no answer in time; it stands here:\n" + (file.read_text() if file.exists() else "(no stack)")

    def _grow(self, world: int) -> None:
        context = _start_method()
        while len(self.workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, str(ROOT)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def close(self, *, politely: bool = False) -> None:
        """End the workers: `politely` lets them exit by themselves (and write their coverage)."""
        for process, pipe in self.workers:
            if politely:
                with contextlib.suppress(OSError):
                    pipe.send(None)
                process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.workers.clear()


def _start_method() -> Any:
    import torch

    if torch.accelerator.is_available():  # looking for devices while importing makes them unusable in forked processes
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


POOL = Pool()


def _work(pipe: Connection, root: str) -> None:
    """The life of a worker: run bodies until told to stop."""
    sys.path.insert(0, root)
    import torch

    from accel_ops.watch.calls import start_recorder

    torch.set_num_threads(1)
    gc.freeze()
    start_recorder()
    if SLOW_RANK is not None:
        sys.addaudithook(_slow_down)
    while (task := pipe.recv()) is not None:
        module, name, rank, world, folder, values = task
        with open(os.path.join(folder, f"stack_{rank}"), "w") as stack, _last_words(folder, rank):
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            error = _run_body(module, name, rank, world, folder, values)
            faulthandler.unregister(signal.SIGUSR1)
        pipe.send(error)


@contextlib.contextmanager
def _last_words(folder: str, rank: int) -> Iterator[None]:
    """Keep what this process prints as an error, and the stack where compiled code (glibc, gloo) ends it."""
    sys.stderr.flush()
    usual = os.dup(2)
    with open(os.path.join(folder, f"errors_{rank}"), "w") as file:
        os.dup2(file.fileno(), 2)
        faulthandler.enable(file=file)
        try:
            yield
        finally:
            faulthandler.disable()
            sys.stderr.flush()
            os.dup2(usual, 2)
            os.close(usual)


def _printed(folder: Path, rank: int) -> str:
    """What `_last_words` has kept of a rank."""
    file = folder / f"errors_{rank}"
    return file.read_text(errors="replace") if file.exists() else ""


def _slow_down(event: str, arguments: tuple[Any, ...]) -> None:
    """Wait for a moment, in the slow rank, before a file of a test is touched."""
    if event in SLOW_EVENTS and os.environ.get("RANK") == SLOW_RANK and "pytest-of-" in str(arguments[0]):
        time.sleep(SLOW_SECONDS * random.SystemRandom().random())  # a generator of its own: tests seed the others


def _run_body(module: str, name: str, rank: int, world: int, folder: str, values: dict[str, Any]) -> str | None:
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    try:
        body = getattr(importlib.import_module(module), name).body
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
        )  # fmt: skip
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        random.seed(0)
        torch.manual_seed(0)
        wanted = {"rank": rank, "world": world}
        names = inspect.signature(body).parameters
        body(**{key: value for key, value in wanted.items() if key in names}, **values)
        dist.barrier()
    except BaseException:
        return traceback.format_exc()
    else:
        return None
    finally:
        for value in values.values():
            if isinstance(value, pytest.MonkeyPatch):  # a copy of the test's, which nobody else undoes here
                value.undo()
        reset_state()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        gc.collect()  # meshes refer to one another: frozen, they would keep their groups, with threads that wake all the time
        gc.freeze()  # what is left is there to stay (modules, mostly): looking at it again costs 0.3 s a test
        restore_environment(before)
