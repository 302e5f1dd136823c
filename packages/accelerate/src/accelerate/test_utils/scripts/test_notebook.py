"""Checks that a program can start processes itself, as notebooks do: `notebook_launcher`.

By itself: `ACCELERATE_NUM_PROCESSES=2 python .../test_utils/scripts/test_notebook.py`; it must not be launched, because it
launches.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from unittest import mock

from accelerate import PartialState, notebook_launcher
from accelerate.test_utils.launching import assert_exception
from accelerate.test_utils.scripts.checks.check import Check, Process, SkippedError
from accelerate.test_utils.scripts.checks.running import FAILED, OK, SKIPPED, Result, complaint, report
from accelerate.utils import DistributedType

MAX_RESTARTS = 3
SLEEP_SECONDS, PATIENCE_SECONDS = 0.2, 60
NUM_PROCESSES = int(os.environ.get("ACCELERATE_NUM_PROCESSES", "1"))


def launch(function: Callable[..., None], *args: object, **settings: object) -> None:
    """Run a function on `NUM_PROCESSES` processes."""
    settings.setdefault("use_port", "0")
    notebook_launcher(function, args, num_processes=NUM_PROCESSES, **settings)  # type: ignore[arg-type]


def basic_function() -> None:
    """Every process has the right world size."""
    state = PartialState()
    assert state.num_processes == NUM_PROCESSES, f"{state.num_processes} processes instead of {NUM_PROCESSES}"
    sys.stdout.write(f"Process {state.process_index} of {state.num_processes} runs on {state.device}.\n")


def fails_at_first(folder: str) -> None:
    """Fail the first time, and leave a note for the next."""
    note = os.path.join(folder, f"rank{os.environ.get('RANK', '0')}")
    if not os.path.exists(note):
        with open(note, "w"):
            pass
        raise RuntimeError("the first attempt fails")
    basic_function()


def test_can_initialize() -> None:
    """The rendezvous works with defaults."""
    launch(basic_function)


def test_static_rdzv_backend() -> None:
    """The static rendezvous backend works."""
    launch(basic_function, rdzv_backend="static")


def test_c10d_rdzv_backend() -> None:
    """The c10d rendezvous backend works."""
    launch(basic_function, rdzv_backend="c10d", rdzv_endpoint="localhost:0")


def test_fault_tolerant() -> None:
    """Processes that fail are restarted."""
    if NUM_PROCESSES == 1:
        raise SkippedError("needs ACCELERATE_NUM_PROCESSES=2 or more")
    with tempfile.TemporaryDirectory() as folder:
        launch(fails_at_first, folder, max_restarts=MAX_RESTARTS)
        names = sorted(os.listdir(folder))
    assert names == [f"rank{rank}" for rank in range(NUM_PROCESSES)], f"attempts of {names}"


def test_monitoring() -> None:
    """The end of the processes is noticed soon after."""
    started = time.perf_counter()
    launch(time.sleep, SLEEP_SECONDS, monitor_interval=0.01)
    took = time.perf_counter() - started
    assert took < SLEEP_SECONDS + PATIENCE_SECONDS, f"processes that slept for {SLEEP_SECONDS} s took {took:.1f} s"


def test_problematic_imports() -> None:
    """Libraries that initialized the device before are named."""
    if NUM_PROCESSES == 1:
        raise SkippedError("needs ACCELERATE_NUM_PROCESSES=2 or more")
    import accel_state.devices
    from accel_cli import notebook

    cuda = mock.Mock(module=lambda: mock.Mock(is_initialized=lambda: True))
    cuda.name = "cuda"
    used = mock.patch.object(accel_state.devices, "detect_device_kind", return_value=cuda)
    named = mock.patch.object(notebook, "are_libraries_initialized", return_value=["bitsandbytes"])
    with used, named, assert_exception(RuntimeError, "bitsandbytes"):
        launch(basic_function)


CHECKS = {
    "initialize": test_can_initialize,
    "static rendezvous": test_static_rdzv_backend,
    "c10d rendezvous": test_c10d_rdzv_backend,
    "restarts": test_fault_tolerant,
    "monitoring": test_monitoring,
    "problematic imports": test_problematic_imports,
}


def run(name: str, function: Callable[[], None]) -> Result:
    """Run one check in this process."""
    started = time.perf_counter()
    status, said = OK, ""
    try:
        function()
    except SkippedError as reason:
        status, said = SKIPPED, str(reason)
    except Exception:
        status, said = FAILED, traceback.format_exc()
    check = Check("notebooks", name, lambda process: function())
    return Result(check, status, time.perf_counter() - started, {0: said})


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    started = time.perf_counter()
    results = [run(name, function) for name, function in CHECKS.items()]
    for result in results:
        if result.status == FAILED:
            sys.stderr.write(complaint(result, 1))
    process = Process(0, 1, DistributedType.NO)
    about = f"{NUM_PROCESSES} processes, started from one ({process.kind.value})"
    sys.stdout.write(report(results, about, time.perf_counter() - started))
    return 1 if any(result.status == FAILED for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
