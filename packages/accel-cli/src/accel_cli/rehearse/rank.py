"""One rank of a simulated cluster: runs a script in this process, and writes what it found out.

`accelerate rehearse` starts it as `python -m accel_cli.rehearse.rank FILE script [arguments]`, in the environment of a launch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_cli.estimate.training import GpuOperations
from accel_cli.estimate.training_report import GRADIENTS, OPTIMIZER, PARAMETERS
from accel_cli.launch.plan import is_on
from accel_cli.rehearse.devices import DEVICES, Device
from accel_cli.rehearse.exchanges import answered_by_this_rank
from accel_cli.rehearse.loaders import Batches, rehearsed_batches
from accel_cli.rehearse.pipelines import measured_stages
from accel_cli.rehearse.recording import Recorder, Step
from accel_cli.rehearse.result import HOST, RESERVE, Exchange, Result, on_device
from accel_cli.rehearse.skipping import skipped_aloud
from accel_cli.rehearse.traffic import Collective
from accel_cli.rehearse.without_values import fake_tensors, replicas
from accel_cli.rehearse.zero import Zero, zero_from_environment

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
NEED_VALUES = (
    ".tolist() is not supported",
    ".numpy() is not supported",
    "Cannot convert",
    "data is not allocated yet",
    "GuardOnDataDependent",
)


class NotRehearsedError(ValueError):
    """A rehearsal cannot know what the script needs."""


def explained(error: Exception, script: str) -> str | None:
    """The reason why a script cannot be rehearsed; None for an error of its own.

    Args:
        error: What it raised.
        script: Its path.
    """
    text = " ".join(str(error).split())
    if isinstance(error, NotRehearsedError):
        return text
    line = _script_line(error, script)
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{line}: the operation {error.func} has no meta kernel, which computes shapes alone. Add --values to rehearse with real "
            "tensors, with a model that fits into this machine's memory."
        )
    if isinstance(error, NEEDS_VALUES) or any(words in text for words in NEED_VALUES):
        operation = getattr(error, "func", None) or text[:120]
        return (
            f"{line} needs the values of a tensor, and a rehearsal has shapes alone ({operation}). Add --values to rehearse with real "
            "tensors, with a model that fits into this machine's memory."
        )
    return None


def _script_line(error: Exception, script: str) -> str:
    """The last line of the script before the error."""
    path = os.path.abspath(script)
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if os.path.abspath(frame.filename) == path
    ]
    return f"{script}:{lines[-1]}" if lines else script


MOST_POINTS = 400  # of the timeline, as many as a page can show
MOST_MODULES = 12
LARGEST_BATCH = 2**16
OFFLOADED = (PARAMETERS, GRADIENTS, OPTIMIZER)
OFFLOAD_NOTE = "offload: its copies and the optimizer on the host take time that is not counted"
Kinds = dict[str, int]  # kind of memory -> bytes
SITE = f"{os.sep}site-packages{os.sep}"
BUSINESS = tuple(
    f"{os.sep}{name}{os.sep}"
    for name in ("accelerate", "accel_integrations", "accel_ops", "accel_data", "torch/optim")
)


class EndOfRehearsal(BaseException):
    """The script has taken all steps that are rehearsed; not an error that a script may catch."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rank is rehearsed.

    Attributes:
        device: A name in `devices.DEVICES`.
        rank: The rank.
        world_size: The number of ranks.
        machines: The number of machines.
        steps: How many optimizer steps are taken.
        values: Whether tensors have values: real ones, in the memory of this machine.
        fake_data: Whether all batches have the shapes of the first one, and only that is read.
        find_batch_size: Whether to look for the largest batch that fits.
    """

    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    machines: int = 1
    steps: int = 3
    values: bool = False
    fake_data: bool = False
    find_batch_size: bool = False


def main(words: list[str]) -> int:
    """Rehearse the script of a command line; the settings are read from a file, and the result is written into it.

    Returns:
        The exit status: that of the script, or 2 if it cannot be rehearsed, which a line on standard error explains.
    """
    path, script, *arguments = words
    with open(path, encoding="utf-8") as file:
        options = json.load(file)
    warnings.filterwarnings(
        "ignore", message="Accessing the data pointer of FakeTensor"
    )  # torch's own, of its replicas
    run_as_module = options.pop("module")
    sys.argv = [script, *arguments]
    sys.path.insert(0, "" if run_as_module else os.path.dirname(os.path.abspath(script)))
    run: Any = runpy.run_module if run_as_module else runpy.run_path
    settings = Settings(**options)
    try:
        result = rehearse(lambda: run(script, run_name="__main__"), settings, script)
    except Exception as error:
        reason = explained(error, script)
        if reason is None:
            raise
        print(f"accelerate rehearse: error: {reason}", file=sys.stderr)
        return 2
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result.as_dict(), file)
    return 0


def rehearse(run: Callable[[], object], settings: Settings, script: str = "") -> Result:
    """Run a training program as one rank of a simulated cluster.

    Args:
        run: The program.
        settings: How.
        script: Its path, for messages.

    Raises:
        NotRehearsedError: It took no optimizer step, or needs what only other ranks know.
    """
    device = DEVICES[settings.device]
    reads: Counter[tuple[str, Any]] = Counter()
    recorder = Recorder(device, lambda step: end.after(step), lambda value: reads.update([(_reader(), value)]))
    notes: list[str] = []
    batches = Batches(recorder, notes, repeats_first=settings.fake_data)
    zero = zero_from_environment(settings.world_size)
    placement = _placement(zero, notes)
    end = _End(settings, device, batches, placement)
    with _cluster(settings.rank, settings.world_size):
        with ExitStack() as stack, suppress(EndOfRehearsal):
            stack.enter_context(skipped_aloud(notes))
            stack.enter_context(answered_by_this_rank())
            stack.enter_context(measured_stages())
            stack.enter_context(rehearsed_batches(batches))
            if device.is_gpu:
                stack.enter_context(_as_on_gpu())
            stack.enter_context(replicas())
            if not settings.values:
                stack.enter_context(fake_tensors())
            stack.enter_context(recorder)
            run()
        if not recorder.steps:
            raise NotRehearsedError(f"{script} took no optimizer step. Rehearse a script that calls optimizer.step().")
        notes += [
            f"{line} reads the value of a tensor; {value} was assumed (--values has real ones)"
            for line, value in reads
            if line
        ]
        if len(recorder.steps) < settings.steps:
            notes.append(
                f"the script ended after {len(recorder.steps)} of {settings.steps} steps; give it more batches for the rest"
            )
        result = _result(recorder.steps[: settings.steps], settings, placement, end.largest_batch, notes)
        return result if zero is None else replace(result, by_module={}, exchanges=zero.exchanges(result.exchanges))


class _End:
    """When a rehearsal ends: after its steps, or once the largest batch that fits has been looked for by doubling and bisecting."""

    def __init__(
        self, settings: Settings, device: Device, batches: Batches, placement: Callable[[Kinds], Kinds]
    ) -> None:
        self._left = settings.steps
        self._limit = device.memory_bytes * (1 - RESERVE) if settings.find_batch_size else 0
        self._batches = batches
        self._placement = placement
        self._fits, self._too_large = 0, LARGEST_BATCH
        self.largest_batch: int | None = None

    def after(self, step: Step) -> None:
        self._left -= 1
        if self._left > 0:
            return
        if not self._limit or not self._batches.size:
            raise EndOfRehearsal
        if on_device(_peak(step, self._placement)) <= self._limit:
            self._fits = self._batches.size
        else:
            self._too_large = self._batches.size
        self.largest_batch = self._fits
        if self._too_large - self._fits <= 1:
            raise EndOfRehearsal
        is_bounded = self._too_large < LARGEST_BATCH
        self._batches.resize((self._fits + self._too_large) // 2 if is_bounded else min(2 * self._fits, LARGEST_BATCH))


@contextmanager
def _cluster(rank: int, world_size: int) -> Iterator[None]:
    """A process group of which only this rank exists; none for a single process."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Operations that need as much memory as on a GPU, and optimizers that update all parameters at once."""
    supported = lambda: ["cpu", "cuda"]  # noqa: E731
    with ExitStack() as stack:
        for owner in map(import_module, ("torch.optim.optimizer", "torch.utils._foreach_utils")):
            stack.enter_context(patch.object(owner, "_get_foreach_kernels_supported_devices", supported))
        optimizers = import_module("torch.optim.optimizer")  # an attribute that torch deletes
        types = [*optimizers._foreach_supported_types, FakeTensor]  # of which parameters are
        stack.enter_context(patch.object(optimizers, "_foreach_supported_types", types))
        stack.enter_context(GpuOperations())
        yield


def _reader() -> str:
    """The line that reads a value; empty where that is torch's own business, or that of a library."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in BUSINESS) or (SITE in path and f"{os.sep}torch{os.sep}" not in path):
            return ""
        if f"{os.sep}torch{os.sep}" not in path and f"{os.sep}accel_cli{os.sep}" not in path:
            return f"{os.path.relpath(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _placement(zero: Zero | None, notes: list[str]) -> Callable[[Kinds], Kinds]:
    """What turns the memory that is counted into that of a rank: DeepSpeed's, or FSDP's that is offloaded."""
    if zero is not None:
        notes.append(zero.note)
        if zero.offload_optimizer or zero.offload_parameters:
            notes.append(OFFLOAD_NOTE)
        return zero.memory
    if is_on(os.environ.get("ACCELERATE_USE_FSDP")) and is_on(os.environ.get("FSDP_OFFLOAD_PARAMS")):
        notes.append(OFFLOAD_NOTE)
        return _offloaded
    return dict


def _peak(step: Step, placement: Callable[[Kinds], Kinds]) -> Kinds:
    """The memory of a rank at its peak, which may be at another time than that of what was counted."""
    return max((placement(live) for live in (step.at_peak, *(live for _, live in step.timeline))), key=on_device)


def _result(
    steps: list[Step],
    settings: Settings,
    placement: Callable[[Kinds], Kinds],
    largest_batch: int | None,
    notes: list[str],
) -> Result:
    last = steps[-1]
    titles = _mesh_titles()
    modules = Counter[str]()
    for name, num_bytes in last.by_module.items():
        modules[re.sub(r"\.\d+(\..*)?$", ".*", name)] += num_bytes
    timeline = [(operation, placement(live)) for operation, live in last.timeline]
    every = max(1, len(timeline) // MOST_POINTS)
    return Result(
        rank=settings.rank,
        world_size=settings.world_size,
        machines=settings.machines,
        steps=len(steps),
        at_peak=_peak(last, placement),
        by_module=dict(modules.most_common(MOST_MODULES)),
        timeline=[
            max(timeline[start : start + every], key=lambda point: on_device(point[1]))
            for start in range(0, len(timeline), every)
        ],
        exchanges=[_exchange(collective, count, settings, titles) for collective, count in last.collectives.items()],
        flops=last.work.flops,
        seconds=last.work.seconds,
        shortest_seconds=last.work.shortest_seconds,
        batch=last.batch[0] if last.batch else [],
        num_batches=len(last.batch),
        data_ranks=_num_data_ranks(settings.world_size),
        largest_batch=largest_batch,
        notes=notes,
    )


def _offloaded(live: Kinds) -> Kinds:
    """Memory where FSDP keeps its shards, their gradients and the optimizer's state on the host."""
    moved = sum(live.get(kind, 0) for kind in OFFLOADED)
    return {kind: n for kind, n in live.items() if kind not in OFFLOADED} | {HOST: live.get(HOST, 0) + moved}


def _exchange(collective: Collective, count: int, settings: Settings, titles: dict[tuple[int, ...], str]) -> Exchange:
    per_machine = max(1, settings.world_size // settings.machines)
    machines = {rank // per_machine for rank in collective.ranks}
    everyone = "all" if len(collective.ranks) == settings.world_size else collective.group
    group = titles.get(collective.ranks, everyone)
    return Exchange(
        collective.name, group, len(collective.ranks), len(machines) > 1, count, collective.num_bytes, collective.in_background
    )  # fmt: skip


def _parallelism() -> Any:
    from accel_state.accelerator_state import AcceleratorState

    return AcceleratorState._shared_state.get("parallelism_config")


def _mesh_titles() -> dict[tuple[int, ...], str]:
    """Ranks of a group -> the mesh dimension along which they are, for those of this rank."""
    config = _parallelism()
    if config is None or config.device_mesh is None:
        return {}
    mesh, names = config.device_mesh, config.device_mesh.mesh_dim_names
    return {tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in names}


def _num_data_ranks(world_size: int) -> int:
    """How many ranks read different batches."""
    config = _parallelism()
    return world_size if config is None or config.total_size == 1 else config.data_parallel_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
