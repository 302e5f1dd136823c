"""Starting processes from a running program: `notebook_launcher` and `debug_launcher`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from accel_cli.errors import UsageError, did_you_mean
from accel_cli.launch.machine import free_port, is_free, network_variables
from accel_cli.launch.plan import OWN_STORE
from accel_cli.launch.settings import PRECISIONS
from accel_cli.launched_function import PrepareForLaunch as PrepareForLaunch
from accel_state import clusters
from accel_state.environment import are_libraries_initialized, parse_flag_from_env, patch_environment

ON_CUDA_WHEN_IMPORTED = ("bitsandbytes",)  # their import initializes CUDA
DEFAULT_PORT = str(clusters.DEFAULT_PORT)


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a training function on several processes from inside a notebook.

    The processes are forked, so that the function may use everything defined in the notebook. It must create its
    `Accelerator` itself. On a machine without accelerators, the processes train on the CPU.

    Args:
        function: The training function.
        args: Its positional arguments.
        num_processes: How many processes to start on this machine. May be left out on Colab, where it is 1.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        use_port: Port of the rendezvous; `"0"` for any free one.
        master_addr: Address of machine 0.
        node_rank: Number of this machine, from 0.
        num_nodes: Number of machines (nodes).
        rdzv_backend: Rendezvous backend.
        rdzv_endpoint: Rendezvous endpoint; `master_addr:use_port` when empty.
        rdzv_conf: Further rendezvous configuration.
        rdzv_id: Name of the job.
        max_restarts: How often to restart all processes after a failure.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: Prefix of each line of output.

    Raises:
        ValueError: An argument is not valid, or an `Accelerator` already exists.
        RuntimeError: CUDA was initialized before, which does not survive a fork.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: A process failed; the message is the
            traceback of the one that failed first.

    With `ACCELERATE_DEBUG_MODE` set, a trial run that only initializes the process state comes before the function.

    Example:
        ```python
        from accelerate import Accelerator, notebook_launcher


        def train(learning_rate):
            accelerator = Accelerator()
            accelerator.print(f"{accelerator.num_processes} processes, {learning_rate=}")


        notebook_launcher(train, args=(0.1,), num_processes=2)
        ```
    """
    if _on_tpu():
        _run_on_tpu(function, args, num_processes, mixed_precision)
        return
    if num_processes is None and not _in_colab():
        raise UsageError("notebook_launcher needs num_processes. Pass how many processes to start.")
    num_processes = 1 if num_processes is None else num_processes
    _check_arguments(num_processes, mixed_precision, node_rank, num_nodes)
    if num_processes <= 1 and num_nodes == 1:
        _run_here(function, args, mixed_precision)
        return

    _check_forks("notebook_launcher")

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from accel_cli.supervise.function import showing_the_first_error
    from accel_state.devices import detect_device_kind

    kind = detect_device_kind()
    _check_unused(kind)
    port = _port(use_port, num_nodes)
    variables = _group_variables(num_processes, node_rank, num_nodes, master_addr, port, mixed_precision)
    variables |= {"ACCELERATE_USE_CPU": "true"} if kind.name == "cpu" else network_variables()
    rdzv_endpoint = rdzv_endpoint or f"{master_addr}:{port}"
    if max_restarts > 0 and num_nodes == 1 and rdzv_backend == "static":  # which does not support restarts
        rdzv_backend, rdzv_endpoint = "c10d", "localhost:0"
        variables[OWN_STORE] = "1"
    rendezvous = dict(rdzv_conf or {})
    if rdzv_backend == "static":
        rendezvous.setdefault("rank", node_rank)
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        run_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_configs=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        start_method="fork",
        log_line_prefix_template=log_line_prefix_template,
        local_addr="localhost" if num_nodes == 1 else None,  # the host's name need not resolve
    )
    print(f"Starting {num_processes} processes on {_cpu_and_why() if kind.name == 'cpu' else kind.name}.")
    with patch_environment(**variables):
        if parse_flag_from_env("ACCELERATE_DEBUG_MODE"):
            _try_processes(config)
        with showing_the_first_error(function) as shown:
            elastic_launch(config, shown)(*args)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run a training function on several CPU processes, for debugging and tests.

    Args:
        function: The training function.
        args: Its positional arguments.
        num_processes: How many processes to start.

    Raises:
        ValueError: `num_processes` is below 1.
        torch.multiprocessing.ProcessRaisedException: A process failed; the message has its traceback.

    Example:
        ```python
        from accelerate import Accelerator, debug_launcher


        def train():
            print(Accelerator().process_index)


        debug_launcher(train)
        ```
    """
    if num_processes < 1:
        raise UsageError(f"num_processes must be at least 1, got {num_processes}.")
    _check_forks("debug_launcher")
    from torch.multiprocessing import start_processes

    with tempfile.NamedTemporaryFile() as rendezvous_file:
        variables = {
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": DEFAULT_PORT,
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_DEBUG_RDV_FILE": rendezvous_file.name,
            "ACCELERATE_USE_CPU": "yes",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        with patch_environment(**variables):
            launcher = PrepareForLaunch(function, debug=True)
            start_processes(launcher, args=tuple(args), nprocs=num_processes, start_method="fork")


def test_launch() -> None:  # not a test: the name is public interface
    """Initialize the state of a process, as a trial."""
    from accel_state.processes import PartialState

    PartialState()


def _try_processes(config: Any) -> None:
    """Start processes that only initialize their state, to tell errors of the notebook from those of the function.

    Raises:
        RuntimeError: One of them failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from accel_cli.supervise.function import showing_the_first_error

    try:
        with showing_the_first_error(test_launch) as shown:
            elastic_launch(config, shown)()
    except ChildFailedError as error:
        raise RuntimeError(
            "notebook_launcher: the trial run (ACCELERATE_DEBUG_MODE) failed before the function was called. Restart "
            f"the notebook, and import less before launching. In the trial run, {error}"
        ) from None


def _run_here(function: Callable[..., Any], args: Iterable[Any], mixed_precision: str) -> None:
    """Run the function in this process."""
    from accel_state.devices import detect_device_kind

    kind = detect_device_kind()
    if kind.name == "mps":
        os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
    print(f"Starting on {'the CPU' if kind.name == 'cpu' else f'one {kind.name} device'}.")
    with patch_environment(**_variables(mixed_precision)):
        function(*args)


def _cpu_and_why() -> str:
    """The CPU in words, with the reason if this machine has GPUs: the processes are told to use it, and so say nothing."""
    from accel_state.nvidia import explain_missing_gpus

    missing = explain_missing_gpus()
    if missing is None:
        return "the CPU"
    return f"the CPU, although this machine has {missing.gpus}: {missing.reason}. {missing.advice}"


def _variables(mixed_precision: str) -> dict[str, str]:
    """The variable of the precision, unless it is the default: then a variable that the user set is kept."""
    return {} if mixed_precision == "no" else {"ACCELERATE_MIXED_PRECISION": mixed_precision}


def _check_arguments(num_processes: int, mixed_precision: str, node_rank: int, num_nodes: int) -> None:
    if mixed_precision not in PRECISIONS:
        hint = did_you_mean(str(mixed_precision), list(PRECISIONS))
        raise UsageError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}.{hint}")
    if num_processes < 0:
        raise UsageError(f"num_processes must not be negative, got {num_processes}.")
    if not 0 <= node_rank < num_nodes:
        raise UsageError(
            f"node_rank must be between 0 and {num_nodes - 1} for num_nodes={num_nodes}, got {node_rank}."
        )


def _group_variables(
    num_processes: int, node_rank: int, num_nodes: int, master_addr: str, port: str, mixed_precision: str
) -> dict[str, str]:
    """The environment variables of a run on several devices or machines."""
    return _variables(mixed_precision) | {
        "NPROC": str(num_processes),
        "NODE_RANK": str(node_rank),
        "WORLD_SIZE": str(num_nodes * num_processes),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": port,
        "MIXED_PRECISION": mixed_precision,
    }


def _check_forks(name: str) -> None:
    if not hasattr(os, "fork"):  # on Windows
        raise UsageError(
            f"{name} forks this process, which {sys.platform} cannot. Put the function into a script, and run: accelerate "
            "launch --cpu --num_processes 2 script.py"
        )


def _check_no_state() -> None:
    processes = sys.modules.get("accel_state.processes")
    if processes is not None and processes.PartialState._shared_state:
        raise UsageError(
            "An Accelerator or PartialState exists in this process already. Restart the notebook, and create it only "
            "inside the function that is launched."
        )


def _check_unused(kind: Any) -> None:
    """Check that nothing is initialized that does not survive a fork."""
    _check_no_state()
    if kind.name == "cpu":
        return
    started = are_libraries_initialized(*ON_CUDA_WHEN_IMPORTED)
    if started:
        raise RuntimeError(
            f"{' and '.join(started)} was imported and has initialized CUDA, which does not survive a fork. Restart "
            "the notebook, and import it only inside the function that is launched."
        )
    if getattr(kind.module(), "is_initialized", bool)():
        raise RuntimeError(
            f"{kind.name} was used in this process already and does not survive a fork. Restart the notebook, and put "
            "nothing on the device before launching."
        )


def _port(wanted: str | int, num_nodes: int) -> str:
    port = int(wanted)
    if port == 0 or (str(wanted) == DEFAULT_PORT and num_nodes == 1 and not is_free(port)):
        return str(free_port())
    return str(port)


def _in_colab() -> bool:
    return "google.colab" in sys.modules


def _on_tpu() -> bool:
    """Whether this is a notebook on Colab or Kaggle with a TPU."""
    in_notebook = _in_colab() or any(name.startswith("KAGGLE") for name in os.environ)
    return in_notebook and (os.environ.get("TPU_NAME") is not None or os.environ.get("PJRT_DEVICE", "") == "TPU")


def _run_on_tpu(
    function: Callable[..., Any], args: Iterable[Any], num_processes: int | None, mixed_precision: str
) -> None:
    """Start a process on every TPU core, or on one, with torch_xla."""
    from accel_cli.launch.runners.tpu import spawner

    _check_arguments(num_processes or 1, mixed_precision, 0, 1)
    _check_no_state()
    spawn = spawner()
    nprocs = 1 if num_processes == 1 else None  # torch_xla starts one process, or one for each core
    print(f"Starting on {'one TPU core' if nprocs == 1 else 'all TPU cores'}.")
    with patch_environment(**_variables(mixed_precision)):
        spawn(PrepareForLaunch(function, distributed_type="XLA"), args=tuple(args), nprocs=nprocs, start_method="fork")
